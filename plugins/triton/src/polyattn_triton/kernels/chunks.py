"""Chunks that queries choose, and what they found there merged: mixture of block attention.

A tile of queries is scored against the means of all chunks, 2 S C D operations, and chooses in registers: scores never
go to memory. What a query found in each of its chunks is read once and merged by its LSE, in the order of the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn_triton import runtime  # noqa: F401  first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.block_sparse import head_at
from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rows import integers, product

__all__ = ["choose", "merge_chosen"]

_MOST = 512
"""Chunks that a tile of queries can be scored against."""


@triton.jit(do_not_specialize=["tokens", "chunks", "kept", "pairs"])
def _choose(
    query, means, own, numbers, firsts, chosen, queries, q_b, q_h, q_s, tokens, chunks, kept, pairs, threshold,
    D: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, C: tl.constexpr, SHARE: tl.constexpr,
    EXACT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """N queries of one head: their own chunk and the highest others, `kept` in all, or until a SHARE is reached.

    COUNT: how many those are; else they are written, from `firsts` of each query on.
    """
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, d, c = tile * N + tl.arange(0, N), tl.arange(0, K), tl.arange(0, C)
    inside, there = s < tokens, c < chunks
    at = head_at(query, b, head, q_b, q_h) + s[:, None].to(tl.int64) * q_s + d[None, :]
    q = tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    row = (b.to(tl.int64) * (tl.num_programs(1) // GROUP) + head // GROUP) * chunks
    m_at = means + (row + c)[:, None] * D + d[None, :]
    m = tl.load(m_at, mask=there[:, None] & (d < D)[None, :], other=0.0)
    scores = product(q, tl.trans(m), tl.zeros([N, C], tl.float32), EXACT)
    mine = c[None, :] == tl.load(own + s, mask=inside, other=0)[:, None]
    others = there[None, :] & ~mine
    if SHARE:
        lowest = tl.min(tl.where(there[None, :], scores, float("inf")), 1)
        highest = tl.max(tl.where(there[None, :], scores, float("-inf")), 1)
        spread = (highest - lowest)[:, None]
        scores = tl.where(spread > 0, (scores - lowest[:, None]) / tl.where(spread > 0, spread, 1.0), 1.0)
        weights = tl.where(there[None, :], scores, 0.0)
        goal = threshold * tl.sum(weights, 1)
        fixed = tl.sum(tl.where(mine, weights, 0.0), 1)
    else:
        weights = scores
        goal = tl.zeros([N], tl.float32)
        fixed = goal
    ordered = tl.where(others, integers(scores), -2147483648)
    # The highest limit with which those that reach it are enough: of any two scores between which it would lie the
    # same ones are chosen, and of equal ones the first.
    low = tl.full([N], -2147483647, tl.int64)
    high = tl.max(ordered, 1).to(tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        reached = others & (ordered >= middle.to(tl.int32)[:, None])
        if SHARE:
            enough = fixed + tl.sum(tl.where(reached, weights, 0.0), 1) >= goal
        else:
            enough = tl.sum(reached.to(tl.int32), 1) >= kept - 1
        low = tl.where(enough & (low < high), middle, low)
        high = tl.where(enough | (low >= high), high, middle - 1)
    least = low.to(tl.int32)[:, None]
    above = others & (ordered > least)
    alike = others & (ordered == least)
    rank = tl.cumsum(alike.to(tl.int32), 1) - 1
    if SHARE:
        # Each is added while what there is before it has not reached the goal.
        before = fixed + tl.sum(tl.where(above, weights, 0.0), 1)
        each = tl.max(tl.where(alike, weights, 0.0), 1)
        last = alike & (before[:, None] + rank * each[:, None] < goal[:, None])
    else:
        last = alike & (rank < (kept - 1 - tl.sum(above.to(tl.int32), 1))[:, None])
    take = (above | last | mine) & there[None, :]
    head_row = b.to(tl.int64) * tl.num_programs(1) + head
    if COUNT:
        tl.store(numbers + head_row * tokens + s, tl.sum(take.to(tl.int32), 1), mask=inside)
    else:
        place = tl.load(firsts + head_row * (tokens + 1) + s, mask=inside, other=0)[:, None]
        place += tl.cumsum(take.to(tl.int32), 1) - 1
        nothing = tl.zeros([N, C], tl.int32)
        written = take & inside[:, None]
        tl.store(chosen + head_row * pairs + place, c[None, :] + nothing, mask=written)
        tl.store(queries + head_row * pairs + place, s[:, None] + nothing, mask=written)


@triton.jit(do_not_specialize=["tokens", "pairs"])
def _merge(outs, lses, places, firsts, out, tokens, pairs, D: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):
    """N queries of one head. `out` is [B, S, H, D]."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, d = tile * N + tl.arange(0, N), tl.arange(0, WIDTH)
    head_row = b.to(tl.int64) * tl.num_programs(1) + head
    first = tl.load(firsts + head_row * (tokens + 1) + s, mask=s < tokens, other=0)
    end = tl.load(firsts + head_row * (tokens + 1) + s + 1, mask=s < tokens, other=0)
    top = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    acc = tl.zeros([N, WIDTH], tl.float32)
    for j in range(tl.max(end - first, 0)):
        place = tl.load(places + head_row * pairs + first + j, mask=first + j < end, other=-1)
        at = head_row * pairs + place
        lse = tl.load(lses + at, mask=place >= 0, other=float("-inf"))
        found = tl.load(outs + at[:, None] * D + d[None, :], mask=(place >= 0)[:, None] & (d < D)[None, :], other=0.0)
        highest = tl.maximum(top, lse)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        factor, weight = tl.exp(top - base), tl.exp(lse - base)
        acc = acc * factor[:, None] + found.to(tl.float32) * weight[:, None]
        total = total * factor + weight
        top = highest
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = (b.to(tl.int64) * tokens + s)[:, None] * (tl.num_programs(1) * D) + head * D + d[None, :]
    tl.store(out + at, cast(acc, out.dtype.element_ty), mask=(s < tokens)[:, None] & (d < D)[None, :])


def choose(
    query: Tensor, means: Tensor, own: Tensor, kept: int, threshold: float | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """See `polyattn.contract.BlockOps`."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    (B, H, S, D), (H_kv, chunks) = query.shape, means.shape[1:3]
    if chunks > _MOST or not query.numel():
        return None
    kept, wide = min(kept, chunks), max(triton.next_power_of_2(chunks), 16)
    tile = max(16, min(64, 16384 // wide))
    means, own = means.contiguous(), own.to(torch.int32)

    def launch(numbers: Tensor, firsts: Tensor, chosen: Tensor, queries: Tensor, count: bool) -> None:
        _choose[triton.cdiv(S, tile), H, B](
            query, means, own, numbers, firsts, chosen, queries, *query.stride()[:3], S, chunks, kept,
            chosen.shape[-1], 0.0 if threshold is None else threshold, D=D, K=triton.next_power_of_2(D),
            GROUP=H // H_kv, N=tile, C=wide, SHARE=threshold is not None, EXACT=query.device.type != "cuda",
            COUNT=count, num_warps=8,
        )  # fmt: skip

    firsts = torch.zeros(B, H, S + 1, dtype=torch.int32, device=query.device)
    if threshold is None:
        firsts += torch.arange(0, (S + 1) * kept, kept, dtype=torch.int32, device=query.device)
        pairs = S * kept
    else:
        numbers = torch.empty(B, H, S, dtype=torch.int32, device=query.device)
        launch(numbers, numbers, numbers, numbers, True)
        torch.cumsum(numbers, -1, dtype=torch.int32, out=firsts[..., 1:])
        pairs = int(firsts[..., -1].max())
    chosen = torch.full((B, H, pairs), chunks, dtype=torch.int32, device=query.device)
    queries = torch.zeros_like(chosen)
    launch(chosen, firsts, chosen, queries, False)
    return chosen, queries, firsts


def merge_chosen(outs: Tensor, lses: Tensor, places: Tensor, firsts: Tensor) -> Tensor:
    """See `polyattn.contract.BlockOps`."""
    B, H, pairs, D = outs.shape
    S = firsts.shape[2] - 1
    out = outs.new_empty(B, S, H, D)
    if out.numel():
        _merge[triton.cdiv(S, 64), H, B](
            outs.contiguous(), lses.float().contiguous(), places.contiguous(), firsts, out, S, pairs, D=D,
            WIDTH=triton.next_power_of_2(D), N=64, num_warps=4,
        )  # fmt: skip
    return out
