"""Scores of the indexer of DeepSeek sparse attention over index keys in pages.

Floor: every index key that a row sees is read once for each TOKENS of its queries: of 32 rows with 64k keys of 128
bfloat16 numbers 512 MB. A program has a block of keys of a row, and goes through some of the row's queries with it.
"""

from __future__ import annotations

from polyattn_triton import runtime  # first: it decides how Triton is imported

import torch  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip
from torch import Tensor  # isort: skip

from polyattn_triton.kernels.cached import as_stored, numbers  # isort: skip
from polyattn_triton.kernels.rounding import cast  # isort: skip
from polyattn_triton.kernels.rules import dot  # isort: skip
from polyattn_triton.kernels.splits import power_of_2  # isort: skip

__all__ = ["index_scores"]

KEYS = 128
"""Keys of a program."""
TOKENS = 16
"""Queries that a program goes through, at most."""


@triton.jit(do_not_specialize=["table_row", "scores_row"])
def _score(
    query, weights, cache, factors, page_table, seq_lens, cu_seqlens_q, scores,
    query_token, query_head, weights_token, cache_page, cache_row, factor_page, factor_row, table_row, scores_row,
    HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, H: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    TOKENS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_seqlens_q + row)
    new = tl.load(cu_seqlens_q + row + 1) - start
    keys = tl.load(seq_lens + row)
    first = tl.program_id(1) * TOKENS
    j = tl.program_id(2) * N + tl.arange(0, N)
    last = tl.minimum(first + TOKENS, new)
    # The last of these queries sees most.
    if (first < new) & (tl.program_id(2) * N < keys - new + last):
        inside = j < keys
        page = tl.load(page_table + row * table_row + j // PAGE, mask=inside, other=0).to(tl.int64)
        c = tl.arange(0, C)
        at = cache + (page * cache_page + j % PAGE * cache_row)[:, None] + c[None, :]
        raw = tl.load(at, mask=inside[:, None] & (c < D)[None, :], other=0.0)
        if FP8:
            key = numbers(raw, "fp8_e4m3", query.dtype.element_ty)
            factor = tl.load(factors + page * factor_page + j % PAGE * factor_row, mask=inside, other=0.0)
        else:
            key = cast(raw, query.dtype.element_ty)
        h = tl.arange(0, H)
        for n in range(first, last):
            token = (start + n).to(tl.int64)
            q = tl.load(
                query + token * query_token + (h * query_head)[:, None] + c[None, :],
                mask=(h < HEADS)[:, None] & (c < D)[None, :], other=0.0,
            )  # fmt: skip
            w = tl.load(weights + token * weights_token + h, mask=h < HEADS, other=0.0).to(tl.float32)
            found = tl.sum(tl.maximum(dot(q, key.T), 0.0) * w[:, None], 0)
            if FP8:
                found *= factor
            tl.store(scores + token * scores_row + j, found, inside)


def index_scores(
    query: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    max_seqlen_q: int,
) -> Tensor:  # fmt: skip
    """As `polyattn.contract.TokenScorer`."""
    (T, heads, D), columns = query.shape, page_table.shape[1]
    page = cache.shape[1]
    scores = query.new_empty(T, columns * page, dtype=torch.float32)
    rows, factors, fp8 = cache, cache, cache.dtype == torch.uint8
    if fp8:
        rows = as_stored(cache[..., :D].view(torch.float8_e4m3fn), "fp8_e4m3")
        factors = cache[..., D:].view(torch.float32)
    if query.stride(2) != 1:
        query = query.contiguous()
    if weights.stride(1) != 1:
        weights = weights.contiguous()
    seq_lens, cu_seqlens_q = seq_lens.contiguous(), cu_seqlens_q.contiguous()
    some = min(TOKENS, max_seqlen_q)
    grid = (page_table.shape[0], triton.cdiv(max_seqlen_q, some), triton.cdiv(columns * page, KEYS))
    if T and scores.shape[1]:
        with runtime.device_of(query):
            _score[grid](
                query, weights, rows, factors, page_table, seq_lens, cu_seqlens_q, scores,
                query.stride(0), query.stride(1), weights.stride(0), rows.stride(0), rows.stride(1), factors.stride(0),
                factors.stride(1), page_table.stride(0), scores.stride(0),
                HEADS=heads, PAGE=page, D=D, H=max(power_of_2(heads), 16), C=max(power_of_2(D), 16), N=KEYS,
                TOKENS=some, FP8=fp8, num_warps=8 if heads > 32 else 4, num_stages=2,
            )  # fmt: skip
    return scores
