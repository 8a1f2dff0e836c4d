"""Scores of the indexer of DeepSeek sparse attention over index keys in pages.

Floor: every index key that a row sees is read once for each TOKENS of its queries: of 32 rows with 64k keys of 128
bfloat16 numbers 512 MB. A program has a block of keys of a row, and goes through some of the row's queries with it. Of
one query it keeps that, and goes through blocks of keys: while some are multiplied, the next are on their way.
"""

from __future__ import annotations

from polyattn_triton import runtime  # first: it decides how Triton is imported

import torch  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip
from torch import Tensor  # isort: skip

from polyattn_triton.kernels.cached import as_stored, least, numbers  # isort: skip
from polyattn_triton.kernels.pairs import nvidia  # isort: skip
from polyattn_triton.kernels.rounding import cast  # isort: skip
from polyattn_triton.kernels.rules import dot  # isort: skip
from polyattn_triton.kernels.splits import power_of_2  # isort: skip

__all__ = ["index_scores"]

KEYS = 128
"""Keys of a program that goes through several queries with them."""
TOKENS = 16
"""Queries that a program goes through, at most."""
STEP, TILES = 64, 8
"""Keys that a program of one query has at once, and how often it has as many, at most."""
ON_THE_WAY = 32 << 10
"""Bytes of keys that such a program waits for, at most; three tiles are enough."""


@triton.jit
def _query(
    query, weights, token, query_token, query_head, weights_token,
    HEADS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A token's queries, [C, H], and the weights of its heads, float32 [H]."""
    h, c = tl.arange(0, H), tl.arange(0, C)
    q = tl.load(
        query + token * query_token + (h * query_head)[:, None] + c[None, :],
        mask=(h < HEADS)[:, None] & (c < D)[None, :], other=0.0,
    )  # fmt: skip
    return q.T, tl.load(weights + token * weights_token + h, mask=h < HEADS, other=0.0).to(tl.float32)


@triton.jit
def _weighed(key, q, w):
    """Scores [N] of keys [N, C]. Heads are columns: a thread has most of those of its keys, and adds them up itself."""
    return tl.sum(tl.maximum(dot(key, q), 0.0) * w[None, :], 1)


@triton.jit(do_not_specialize=["table_row", "scores_row", "each"])
def _score(
    query, weights, cache, factors, page_table, seq_lens, cu_seqlens_q, scores,
    query_token, query_head, weights_token, cache_page, factor_page, table_row, scores_row, each,
    HEADS: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    N: tl.constexpr, TOKENS: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`each` keys of a row, a multiple of N. ROW: entries of the cache from a key to the next in its page, known to the
    compiler for the sake of FP8: it sees rows of whole words, and loads four numbers at once instead of one."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_seqlens_q + row)
    new = tl.load(cu_seqlens_q + row + 1) - start
    first = tl.program_id(1) * TOKENS
    last = tl.minimum(first + TOKENS, new)
    begin = tl.program_id(2) * each
    # The last of these queries sees most.
    seen = tl.load(seq_lens + row) - new + last
    if (first < new) & (begin < seen):
        table = page_table + row * table_row
        n, c = tl.arange(0, N), tl.arange(0, C)
        token = (start + first).to(tl.int64)
        if TOKENS == 1:
            q, w = _query(query, weights, token, query_token, query_head, weights_token, HEADS, D, H, C)
        for at in tl.range(begin, tl.minimum(begin + each, seen), N, num_stages=STAGES):
            if PAGE % N == 0:
                # What is past the last key is of its page, and nobody's score.
                page = tl.load(table + at // PAGE).to(tl.int64)
                keys = cache + page * cache_page + at % PAGE * ROW + (n * ROW)[:, None] + c[None, :]
                scales = factors + page * factor_page + at % PAGE * (ROW // 4) + n * (ROW // 4)
            else:
                known = tl.minimum(at + n, seen - 1)
                page = tl.load(table + known // PAGE).to(tl.int64)
                keys = cache + (page * cache_page + known % PAGE * ROW)[:, None] + c[None, :]
                scales = factors + page * factor_page + known % PAGE * (ROW // 4)
            raw = tl.load(keys) if C == D else tl.load(keys, mask=(c < D)[None, :], other=0.0)
            if FP8:
                key = numbers(raw, "fp8_e4m3", query.dtype.element_ty)
                factor = tl.load(scales)
            else:
                key = cast(raw, query.dtype.element_ty)
            if TOKENS == 1:
                found = _weighed(key, q, w)
                tl.store(scores + token * scores_row + at + n, found * factor if FP8 else found, at + n < seen)
            else:
                for t in range(first, last):
                    token = (start + t).to(tl.int64)
                    q, w = _query(query, weights, token, query_token, query_head, weights_token, HEADS, D, H, C)
                    found = _weighed(key, q, w)
                    tl.store(scores + token * scores_row + at + n, found * factor if FP8 else found, at + n < seen)


def _cut(query: Tensor, rows: Tensor, tiles: int) -> tuple[int, int]:
    """(tiles of a program that has one query, stages of its loop), of `tiles` in all with STEP keys each."""
    # A stage brings page numbers, the next but one their keys. Others than NVIDIA's compilers keep every stage's keys.
    size = STEP * power_of_2(query.shape[2]) * rows.element_size()
    stages = 2 * min(max(ON_THE_WAY // size, 1), 3) + 1 if nvidia(query.device) else 2
    return min(max(tiles // (4 * runtime.processors(query.device)), 1), TILES), stages


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
    if not (T and scores.shape[1]):
        return scores
    keys, tiles, stages, warps = KEYS, 1, 2, 8 if heads > 32 else 4
    if some == 1:
        keys, warps = STEP, 4
        tiles, stages = _cut(query, rows, page_table.shape[0] * triton.cdiv(scores.shape[1], keys))
    grid = (page_table.shape[0], triton.cdiv(max_seqlen_q, some), triton.cdiv(scores.shape[1], keys * tiles))
    with runtime.device_of(query):
        _score[grid](
            query, weights, rows, factors, page_table, seq_lens, cu_seqlens_q, scores,
            query.stride(0), query.stride(1), weights.stride(0), rows.stride(0), factors.stride(0),
            page_table.stride(0), scores.stride(0), keys * tiles,
            HEADS=heads, PAGE=page, ROW=rows.stride(1), D=D, H=max(power_of_2(heads), 16),
            C=max(power_of_2(D), least(8 * rows.element_size())), N=keys, TOKENS=some, FP8=fp8, STAGES=stages,
            num_warps=warps, num_stages=2,
        )  # fmt: skip
    return scores
