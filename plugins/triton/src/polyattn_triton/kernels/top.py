"""The tokens of the highest scores: of each row the `topk` highest of those that its query sees.

A program has SPAN scores of a row in registers and narrows their range until it knows the least of the highest. Rows
that are longer are halved at least in every launch: each program keeps `topk` of its span, and the next launch chooses
among those.

Floor: scores are read once, 4 bytes each, and the list is written once. Of 32 rows with 64k scores that is 8 MB, a few
microseconds; the counts of a program, each over all its warps, take longer.
"""

from __future__ import annotations

from polyattn_triton import runtime  # first: it decides how Triton is imported

import torch  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip
from torch import Tensor  # isort: skip

from polyattn.semantics.token_index import top_tokens as by_torch  # isort: skip
from polyattn_triton.kernels.rows import integers, limit  # isort: skip

__all__ = ["SPAN", "top_tokens"]

SPAN = 16384
"""Scores of a program, at most. Longer lists than half of it are torch's to make: no launch would leave fewer."""


@triton.jit(do_not_specialize=["scores_row", "places_row", "count", "topk", "spans"])
def _top(
    scores, places, seen, kept_scores, kept_places, scores_row, places_row, count, topk, spans,
    SPAN: tl.constexpr, COLUMNS: tl.constexpr, LISTED: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    n = tl.arange(0, SPAN)
    at = span * SPAN + n
    if LISTED:
        place = tl.load(places + row * places_row + at, mask=at < count, other=-1)
        real = place >= 0
    else:
        place = at
        real = at < tl.minimum(tl.load(seen + row), count)
    raw = tl.load(scores + row * scores_row + at, mask=real, other=0.0)
    # No number is the least of all; what is hidden is below that.
    ordered = tl.where(real, integers(tl.where(raw == raw, raw, float("-inf"))), -2147483648)
    there = tl.sum(real.to(tl.int32), 0)
    least = tl.min(tl.where(real, ordered, 2147483647), 0)
    if there > topk:
        least, _ = limit(ordered, least, tl.max(ordered, 0), there, topk)
    # Those above come first, then as many of the equal ones as there is room for: both counted in one number.
    above = real & (ordered > least)
    equal = real & (ordered == least)
    # A column is a thread's, which counts it by itself; then the columns are added up.
    both = tl.reshape(above.to(tl.int32) + (equal.to(tl.int32) << 16), (SPAN // COLUMNS, COLUMNS))
    columns = tl.sum(both, 0)
    total = tl.sum(columns, 0) & 0xFFFF
    both = tl.reshape(tl.cumsum(both, 0) + (tl.cumsum(columns, 0) - columns)[None, :], (SPAN,))
    slot = tl.where(above, both & 0xFFFF, total + (both >> 16)) - 1
    keep = (above | equal) & (slot < topk)
    to = (row * spans + span) * topk
    tl.store(kept_places + to + slot, place, mask=keep)
    if not LAST:
        tl.store(kept_scores + to + slot, raw, mask=keep)
    # What is not there.
    found = tl.minimum(there, topk)
    if found < topk:
        for first in range(0, topk, SPAN):
            behind = (first + n >= found) & (first + n < topk)
            tl.store(kept_places + to + first + n, tl.full((SPAN,), -1, tl.int32), mask=behind)


def top_tokens(scores: Tensor, seen: Tensor, topk: int) -> Tensor:
    """As `polyattn.contract.TokenLister`."""
    rows, count = scores.shape
    if 2 * topk > SPAN < count:
        return by_torch(scores, seen, topk)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    seen = seen.to(torch.int32).contiguous()
    places, listed = scores.new_empty(rows, topk, dtype=torch.int32), False
    if not count:
        return places.fill_(-1)
    given, place = scores, places
    with runtime.device_of(scores):
        while rows:
            span = min(max(triton.next_power_of_2(count), triton.next_power_of_2(topk), 128), SPAN)
            spans = triton.cdiv(count, span)
            found = places if spans == 1 else scores.new_empty(rows, spans * topk, dtype=torch.int32)
            kept = scores if spans == 1 else scores.new_empty(rows, spans * topk)
            warps = max(span // 1024, 4)
            _top[(rows, spans)](
                given, place, seen, kept, found, given.stride(0), place.stride(0), count, topk, spans,
                SPAN=span, COLUMNS=min(span, 32 * warps), LISTED=listed, LAST=spans == 1, num_warps=warps,
            )  # fmt: skip
            if spans == 1:
                break
            given, place, listed, count = kept, found, True, spans * topk
    return places
