"""Chunks that queries choose, and what they found there merged: mixture of block attention.

A tile of queries is scored against the means of all chunks, 2 S C D operations, and chooses in registers: scores never
go to memory. Queries that chose a chunk are read where they are and meet it in tiles, so that work follows each query's
own choice. What it found in each of its chunks is written and read once, 4 D bytes of a pair in 16 bits against the
4 D n operations of a chunk of n keys, and merged by its LSE, in the order of the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.block_sparse import Tiles, head_at
from polyattn_triton.kernels.choices import architecture
from polyattn_triton.kernels.room import Loop, Room, fitting, shared_memory
from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rows import gather, halves, split
from polyattn_triton.kernels.rules import LOG2E, accumulate, dot, natural_lse, share

__all__ = ["attend_chosen", "choose", "meet", "merge_chosen"]

_MOST = 512
"""Chunks that a tile of queries can be scored against."""
_HELD = 128
"""Keys of chunks that a program keeps, while tiles of queries pass."""
_TURNS = 16
"""Tiles of queries that pass."""
_PART = 128
"""Queries that are counted together."""
_ROWS = 48
"""Results of a query, over all heads, that are held at once."""


@triton.jit(do_not_specialize=["tokens", "chunks", "kept"])
def _choose(
    query, means, means_rest, own, numbers, words, q_b, q_h, q_s, tokens, chunks, kept, threshold,
    D: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    SHARE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """N queries of one head: their own chunk and the highest others, `kept` in all, or until a SHARE is reached. A bit
    for each chunk, and how many those are."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, d, c = tile * N + tl.arange(0, N), tl.arange(0, PIECE), tl.arange(0, C)
    inside, there = s < tokens, c < chunks
    row = (b.to(tl.int64) * (tl.num_programs(1) // GROUP) + head // GROUP) * chunks
    scores = tl.zeros([N, C], tl.float32)
    # Piece by piece: whole means of many chunks are more numbers than registers hold.
    for first in range(0, K, PIECE):
        e = first + d
        at = head_at(query, b, head, q_b, q_h) + s[:, None].to(tl.int64) * q_s + e[None, :]
        q = tl.load(at, mask=inside[:, None] & (e < D)[None, :], other=0.0)
        m_at, m_there = (row + c)[:, None] * D + e[None, :], there[:, None] & (e < D)[None, :]
        m = tl.load(means + m_at, mask=m_there, other=0.0)
        if EXACT:
            scores = tl.dot(q.to(tl.float32), tl.trans(m), scores, input_precision="ieee")
        else:
            q, q_rest = halves(q.to(tl.float32))
            m_rest = tl.load(means_rest + m_at, mask=m_there, other=0.0)
            scores = tl.dot(q, tl.trans(m), scores)
            scores = tl.dot(q, tl.trans(m_rest), scores)
            scores = tl.dot(q_rest, tl.trans(m), scores)
    mine = c[None, :] == tl.load(own + s, mask=inside, other=0)[:, None]
    others = there[None, :] & ~mine
    lowest = tl.min(tl.where(there[None, :], scores, float("inf")), 1)
    highest = tl.max(tl.where(there[None, :], scores, float("-inf")), 1)
    spread = (highest - lowest)[:, None]
    weights = tl.where(spread > 0, (scores - lowest[:, None]) / tl.where(spread > 0, spread, 1.0), 1.0)
    weights = tl.where(there[None, :], weights, 0.0)
    fixed = tl.sum(tl.where(mine, weights, 0.0), 1)
    goal = threshold * tl.sum(weights, 1)
    weights = tl.where(others, weights, -1.0)
    # The highest limit with which those that reach it are enough, in steps of 2**-23, of which float32 has all from 0
    # to 1. Scores of one step are alike, and of these the first are taken.
    STEP: tl.constexpr = 1.0 / 8388608.0
    low = tl.zeros([N], tl.int32)
    high = (tl.maximum(tl.max(weights, 1), 0.0) * 8388608.0).to(tl.int32)
    while tl.max(high - low, 0) > 0:
        middle = (low + high + 1) >> 1
        reached = weights >= (middle.to(tl.float32) * STEP)[:, None]  # above 0, so others
        if SHARE:
            enough = fixed + tl.sum(tl.where(reached, weights, 0.0), 1) >= goal
        else:
            count = tl.sum(reached.to(tl.int32), 1)
            enough = count >= kept - 1
            high = tl.where(count == kept - 1, tl.minimum(middle, high), high)
        low = tl.where(enough & (low < high), tl.minimum(middle, high), low)
        high = tl.where(enough | (low >= high), high, middle - 1)
    above = weights >= ((low + 1).to(tl.float32) * STEP)[:, None]
    alike = (weights >= (low.to(tl.float32) * STEP)[:, None]) & ~above
    # As a rule a step has one score: who is first among several is asked where there are.
    rank = tl.zeros([N, C], tl.int32)
    if tl.max(tl.sum(alike.to(tl.int32), 1), 0) > 1:
        rank = tl.cumsum(alike.to(tl.int32), 1) - 1
    if SHARE:
        # Each is added while what there is before it has not reached the goal.
        before = fixed + tl.sum(tl.where(above, weights, 0.0), 1)
        each = tl.max(tl.where(alike, weights, 0.0), 1)
        last = alike & (before[:, None] + rank * each[:, None] < goal[:, None])
    else:
        last = alike & (rank < (kept - 1 - tl.sum(above.to(tl.int32), 1))[:, None])
    take = (above | last | mine) & there[None, :]
    at = (b.to(tl.int64) * tl.num_programs(1) + head) * tokens + s
    tl.store(numbers + at, tl.sum(take.to(tl.int32), 1), mask=inside)
    bits = tl.reshape(take.to(tl.int32), [N, C // 32, 32]) << tl.arange(0, 32)[None, None, :]
    w = tl.arange(0, C // 32)
    tl.store(words + at[:, None] * (C // 32) + w[None, :], tl.sum(bits, 2), mask=inside[:, None])


@triton.jit(do_not_specialize=["tokens", "pairs"])
def _pairs(words, firsts, chosen, queries, tokens, pairs, N: tl.constexpr, C: tl.constexpr):
    """The pairs of N queries of one head, from `firsts` of each query on."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, c = tile * N + tl.arange(0, N), tl.arange(0, C)
    inside = (s < tokens)[:, None]
    row = b.to(tl.int64) * tl.num_programs(1) + head
    word = tl.load(words + (row * tokens + s[:, None]) * (C // 32) + c[None, :] // 32, mask=inside, other=0)
    take = (word >> (c % 32)[None, :]) & 1
    place = tl.load(firsts + row * (tokens + 1) + s[:, None], mask=inside, other=0) + tl.cumsum(take, 1) - 1
    nothing = tl.zeros([N, C], tl.int32)
    tl.store(chosen + row * pairs + place, c[None, :] + nothing, mask=take != 0)
    tl.store(queries + row * pairs + place, s[:, None] + nothing, mask=take != 0)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _chosen(words, counts, tokens, chunks, PART: tl.constexpr, C: tl.constexpr):
    """How many queries of one part of a head choose each chunk. `counts`: [B, H, chunks, parts]."""
    part, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = b.to(tl.int64) * tl.num_programs(1) + head
    s, c = part * PART + tl.arange(0, PART), tl.arange(0, 32)
    for w in range(C // 32):
        word = tl.load(words + (row * tokens + s) * (C // 32) + w, mask=s < tokens, other=0)
        number = tl.sum((word[:, None] >> c[None, :]) & 1, 0)
        at = (row * chunks + w * 32 + c) * tl.num_programs(0) + part
        tl.store(counts + at, number, mask=w * 32 + c < chunks)


@triton.jit(do_not_specialize=["tokens", "chunks", "pairs"])
def _placed(words, before, firsts, queries, places, tokens, chunks, pairs, PART: tl.constexpr, C: tl.constexpr):
    """The pairs of one part of a head, chunk after chunk, and where those of each query are. `before`: [B, H, chunks,
    parts], the pairs in front of a part's."""
    part, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = b.to(tl.int64) * tl.num_programs(1) + head
    s, c = part * PART + tl.arange(0, PART), tl.arange(0, 32)
    inside = s < tokens
    first = tl.load(firsts + row * (tokens + 1) + s, mask=inside, other=0)
    for w in range(C // 32):
        word = tl.load(words + (row * tokens + s) * (C // 32) + w, mask=inside, other=0)
        take = (word[:, None] >> c[None, :]) & 1
        at = (row * chunks + w * 32 + c) * tl.num_programs(0) + part
        place = tl.load(before + at, mask=w * 32 + c < chunks, other=0)[None, :] + tl.cumsum(take, 0) - 1
        tl.store(queries + row * pairs + place, s[:, None] + tl.zeros_like(place), mask=take != 0)
        mine = first[:, None] + tl.cumsum(take, 1) - 1
        tl.store(places + row * pairs + mine, place, mask=take != 0)
        first += tl.sum(take, 1)


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _attend(
    query, key, value, queries, counts, tokens, starts, sizes, outs, lses, scale,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, pairs, chunks,
    D: tl.constexpr, D_V: tl.constexpr, K: tl.constexpr, K_V: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, TURNS: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr,
    NEGATIVE: tl.constexpr,
):  # fmt: skip
    """TURNS tiles of M queries that chose one chunk of a head. `scale`: |scale| * log2(e).

    HELD: a chunk has no more than N keys, which stay while tiles of queries pass; else N of them pass at a time.
    """
    part, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = b.to(tl.int64) * tl.num_programs(1) + head
    c = tl.arange(0, C)
    # Which chunk: programs of the chunks before it are passed by, and so are their pairs.
    number = tl.load(counts + row * chunks + c, mask=c < chunks, other=0)
    programs = (number + M * TURNS - 1) // (M * TURNS)
    before = tl.cumsum(programs, 0) <= part
    chunk = tl.sum(before.to(tl.int32), 0)
    if chunk < chunks:
        passed = tl.sum(tl.where(before, number, 0), 0)
        first = passed + (part - tl.sum(tl.where(before, programs, 0), 0)) * (M * TURNS)
        end = passed + tl.sum(tl.where(c == chunk, number, 0), 0)
        start, size = tl.load(starts + chunk), tl.load(sizes + chunk)
        m, n, d, e = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K_V)
        rows = head_at(query, b, head, q_b, q_h) + d[None, :]
        keys = head_at(key, b, head // GROUP, k_b, k_h) + d[None, :]
        values = head_at(value, b, head // GROUP, v_b, v_h) + e[None, :]
        listed = queries + row * pairs
        width, width_v = (d < D)[None, :], (e < D_V)[None, :]
        if HELD:
            token = tl.load(tokens + start + n, mask=n < size, other=0).to(tl.int64)[:, None]
            k = tl.load(keys + token * k_s, mask=(n < size)[:, None] & width, other=0.0)
            v = tl.load(values + token * v_s, mask=(n < size)[:, None] & width_v, other=0.0)
            i = first + m
            mine = tl.load(listed + i, mask=i < end, other=0)
            for turn in tl.range(0, tl.minimum(TURNS, tl.cdiv(end - first, M)), num_stages=STAGES):
                i = first + turn * M + m
                there = i < end
                q = tl.load(rows + mine.to(tl.int64)[:, None] * q_s, mask=there[:, None] & width, other=0.0)
                mine = tl.load(listed + i + M, mask=i + M < end, other=0)
                if NEGATIVE:
                    q = cast(-q.to(tl.float32), q.dtype)
                products = tl.where((n < size)[None, :], dot(q, tl.trans(k)), float("-inf"))
                top = tl.full([M], float("-inf"), tl.float32)
                weights, _, top, total = accumulate(top, tl.zeros([M], tl.float32), products, scale)
                acc = dot(cast(weights, v.dtype), v)
                at = row * pairs + i
                found = cast(acc * share(total)[:, None], outs.dtype.element_ty)
                tl.store(outs + at[:, None] * D_V + e[None, :], found, mask=there[:, None] & width_v)
                tl.store(lses + at, natural_lse(top, total), mask=there)
        else:
            i = first + m
            there = i < end
            mine = tl.load(listed + i, mask=there, other=0).to(tl.int64)
            q = tl.load(rows + mine[:, None] * q_s, mask=there[:, None] & width, other=0.0)
            if NEGATIVE:
                q = cast(-q.to(tl.float32), q.dtype)
            top = tl.full([M], float("-inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, K_V], tl.float32)
            token = tl.load(tokens + start + n, mask=n < size, other=0)
            for done in tl.range(0, size, N, num_stages=STAGES):
                some = done + n < size
                far = token.to(tl.int64)[:, None]
                token = tl.load(tokens + start + done + N + n, mask=done + N + n < size, other=0)
                k = tl.load(keys + far * k_s, mask=some[:, None] & width, other=0.0)
                products = tl.where(some[None, :], dot(q, tl.trans(k)), float("-inf"))
                weights, factor, top, total = accumulate(top, total, products, scale)
                v = tl.load(values + far * v_s, mask=some[:, None] & width_v, other=0.0)
                acc = dot(cast(weights, v.dtype), v, acc * factor[:, None])
            at = row * pairs + i
            found = cast(acc * share(total)[:, None], outs.dtype.element_ty)
            tl.store(outs + at[:, None] * D_V + e[None, :], found, mask=there[:, None] & width_v)
            tl.store(lses + at, natural_lse(top, total), mask=there)


@triton.jit(do_not_specialize=["tokens", "pairs"])
def _merge(
    outs, lses, places, firsts, out, tokens, pairs, o_b, o_h, o_s, D: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """N queries of one head, TOGETHER results of each at a time."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, d = tile * N + tl.arange(0, N), tl.arange(0, WIDTH)
    head_row = b.to(tl.int64) * tl.num_programs(1) + head
    first = tl.load(firsts + head_row * (tokens + 1) + s, mask=s < tokens, other=0)
    end = tl.load(firsts + head_row * (tokens + 1) + s + 1, mask=s < tokens, other=0)
    top = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    acc = tl.zeros([N, WIDTH], tl.float32)
    some = tl.arange(0, TOGETHER)
    for j in range(0, tl.max(end - first, 0), TOGETHER):
        i = first[:, None] + j + some[None, :]
        place = tl.load(places + head_row * pairs + i, mask=i < end[:, None], other=-1)
        at = head_row * pairs + place
        lse = tl.load(lses + at, mask=place >= 0, other=float("-inf"))
        there = (place >= 0)[:, :, None] & (d < D)[None, None, :]
        found = tl.load(outs + at[:, :, None] * D + d[None, None, :], mask=there, other=0.0)
        highest = tl.maximum(top, tl.max(lse, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        factor, weight = tl.exp(top - base), tl.exp(lse - base[:, None])
        acc = acc * factor[:, None] + tl.sum(found.to(tl.float32) * weight[:, :, None], 1)
        total = total * factor + tl.sum(weight, 1)
        top = highest
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = head_at(out, b, head, o_b, o_h) + s[:, None].to(tl.int64) * o_s + d[None, :]
    tl.store(at, cast(acc, out.dtype.element_ty), mask=(s < tokens)[:, None] & (d < D)[None, :])


class _Choice(NamedTuple):
    """What each query chose. words: int32 [B, H, S, wide / 32], a bit for each chunk. firsts: [B, H, S + 1], the first
    of its pairs. pairs: room for those of a head."""

    words: Tensor
    firsts: Tensor
    wide: int
    pairs: int


@runtime.on_its_device
def _choice(query: Tensor, means: Tensor, own: Tensor, kept: int, threshold: float | None) -> _Choice | None:
    """Arguments as `choose`. A threshold waits for the device: how many pairs there are."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    (B, H, S, D), (H_kv, chunks) = query.shape, means.shape[1:3]
    if chunks > _MOST or not query.numel():
        return None
    kept, wide = min(kept, chunks), max(triton.next_power_of_2(chunks), 32)
    tile, width, exact = max(16, min(64, 16384 // wide)), triton.next_power_of_2(D), query.device.type != "cuda"
    numbers = torch.empty(B, H, S, dtype=torch.int32, device=query.device)
    words = torch.empty(B, H, S, wide // 32, dtype=torch.int32, device=query.device)
    means = means.contiguous()
    _choose[triton.cdiv(S, tile), H, B](
        query, *((means, means) if exact else split(means)), own.to(torch.int32), numbers, words, *query.stride()[:3],
        S, chunks, kept, 0.0 if threshold is None else threshold, D=D, K=width, PIECE=max(16, min(32, width)),
        GROUP=H // H_kv, N=tile, C=wide, SHARE=threshold is not None, EXACT=exact, num_warps=8,
        # Means of 512 chunks that are loaded ahead are 132 KiB of shared memory, and 32 where nothing is.
        num_stages=3 if architecture(query.device) == "hopper" else 1,
    )  # fmt: skip
    firsts = torch.zeros(B, H, S + 1, dtype=torch.int32, device=query.device)
    torch.cumsum(numbers, -1, dtype=torch.int32, out=firsts[..., 1:])
    return _Choice(words, firsts, wide, S * kept if threshold is None else int(firsts[..., -1].max()))


@runtime.on_its_device
def choose(
    query: Tensor, means: Tensor, own: Tensor, kept: int, threshold: float | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """See `polyattn.contract.BlockOps`."""
    found = _choice(query, means, own, kept, threshold)
    if found is None:
        return None
    (B, H, S), (words, firsts, wide, P) = query.shape[:3], found
    chosen = torch.full((B, H, P), means.shape[2], dtype=torch.int32, device=query.device)
    queries = torch.zeros_like(chosen)
    tile = max(16, min(64, 16384 // wide))
    _pairs[triton.cdiv(S, tile), H, B](words, firsts, chosen, queries, S, P, N=tile, C=wide, num_warps=8)
    return chosen, queries, firsts


def _tiles(query: Tensor, width: int, longest: int) -> tuple[Tiles, bool]:
    """How queries meet chunks there, and whether keys stay while queries pass: where they are read again for each tile,
    chunks of few keys would cost more than their queries. width: of a row, up to a power of two."""
    where, limit, row = architecture(query.device), shared_memory(query.device), width * query.dtype.itemsize

    def loop(t: Tiles, held: bool) -> Loop:
        stays, passes = (2 * t.n, t.m) if held else (t.m, 2 * t.n)
        return Loop(t.m, t.n, t.warps, t.stages, stays * row, passes * row, passes * row, query.dtype.itemsize)

    if longest <= _HELD and row <= 256:
        rows = 16 if query.dtype == torch.float32 else 64
        wanted = Tiles(rows, max(16, triton.next_power_of_2(longest)), 4, 2)
        room = Room(lambda t: loop(t, True), (("stages", 2), ("m", 32), ("stages", 1), ("m", 16)))
        found = fitting(wanted, (room,), where, limit)
        if limit is None or loop(found, True).needs(where) <= limit:
            return found, True
    if query.dtype == torch.float32:
        wanted = Tiles(16, 16, 4, 1)  # products that no tensor core takes: all their numbers are in registers
    elif width > 128:
        wanted = Tiles(64, 32, 8, 2)
    else:
        wanted = Tiles(128, 32, 8, 3) if where == "hopper" else Tiles(64, 64, 4, 2)
    room = Room(lambda t: loop(t, False), (("stages", 2), ("n", 32), ("stages", 1), ("n", 16)))
    return fitting(wanted, (room,), where, limit), False


@runtime.on_its_device
def meet(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    counts: Tensor,
    chunks: tuple[Tensor, Tensor, Tensor],
    *,
    longest: int,
    scale: float,
    tiles: tuple[Tiles, bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries to a chunk each, in the order of chunks.

    Args:
        query, key, value, chunks, longest, scale: as `attend_chosen`. queries: int32 [B, H_q, P], chunk after chunk;
            counts: int32 [B, H_q, C], how many of each. tiles: instead of what `_tiles` says.

    Returns:
        (outs [B, H_q, P, D_v] of the query's dtype; lses float32 [B, H_q, P]), anything behind a head's last pair.
    """
    (B, H, _, D), D_V = query.shape, value.shape[3]
    P, count = queries.shape[2], counts.shape[2]
    outs = query.new_empty(B, H, P, D_V)
    lses = torch.empty(B, H, P, dtype=torch.float32, device=query.device)
    wide, wide_v = (triton.next_power_of_2(n) for n in (D, D_V))
    t, held = tiles or _tiles(query, max(wide, wide_v), longest)
    turns = _TURNS if held else 1
    more: dict[str, Any] = {"GROUP": H // key.shape[1], "C": max(16, triton.next_power_of_2(count))}
    _attend[triton.cdiv(P, t.m * turns) + count, H, B](
        query, key, value, queries, counts, *chunks, outs, lses,
        # 0 times -inf would be NaN; a scale as small as this leaves logits that are 0 as well.
        max(abs(scale), 1e-30) * LOG2E.value,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], P, count, D=D, D_V=D_V, K=wide, K_V=wide_v,
        M=t.m, N=t.n, TURNS=turns, HELD=held, STAGES=t.stages, NEGATIVE=scale < 0, **more,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return outs, lses


@runtime.on_its_device
def attend_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    means: Tensor,
    chunks: tuple[Tensor, ...],
    longest: int,
    kept: int,
    threshold: float | None,
    scale: float,
    packed: Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]] | None,
) -> tuple[Tensor, Tensor] | None:
    """See `polyattn.contract.BlockOps`."""
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    *lists, own = chunks
    choice = _choice(query, means, own, kept, threshold)
    if choice is None:
        return None
    (words, firsts, wide, P), (B, H, S) = choice, query.shape[:3]
    group, count, parts = H // key.shape[1], means.shape[2], triton.cdiv(S, _PART)
    counts = torch.empty(B, H, count, parts, dtype=torch.int32, device=query.device)
    _chosen[parts, H, B](words, counts, S, count, PART=_PART, C=wide, num_warps=4)
    before = counts.cumsum(-1, dtype=torch.int32)
    totals = before[..., -1].contiguous()
    before = before - counts + (totals.cumsum(-1, dtype=torch.int32) - totals)[..., None]
    out = query.new_empty(B, S, H, value.shape[3])
    # Each chunk of a query has a result: those of some heads at once, where all would take all memory.
    together = max(1, int(_ROWS / (2 if packed else 1) * S / max(P, 1) / group)) * group
    for head in range(0, H, together):
        mine, keys = slice(head, head + together), slice(head // group, (head + together) // group)
        some, first = query[:, mine], firsts[:, mine].contiguous()
        queries, places = (torch.zeros(B, some.shape[1], P, dtype=torch.int32, device=query.device) for _ in range(2))
        _placed[parts, some.shape[1], B](
            words[:, mine].contiguous(), before[:, mine].contiguous(), first, queries, places, S, count, P, PART=_PART,
            C=wide, num_warps=4,
        )  # fmt: skip
        if packed is None:
            here = (key[:, keys], value[:, keys], queries, totals[:, mine].contiguous())
            outs, lses = meet(some, *here, tuple(lists), longest=longest, scale=scale)
        else:
            starts = torch.arange(0, P, 64, dtype=torch.int32, device=query.device)
            pieces = (t.expand(B, some.shape[1], -1).contiguous() for t in (starts, (P - starts).clamp(max=64)))
            rows, _ = gather(some, (queries, *pieces), 64, filled=False, means=False)
            outs, lses = packed(rows, totals[:, mine], keys)
        _merged(outs, lses, places, first, out[:, :, mine].transpose(1, 2))
        del outs, lses  # before the next ones take memory
    return out, totals


@runtime.on_its_device
def _merged(outs: Tensor, lses: Tensor, places: Tensor, firsts: Tensor, out: Tensor) -> None:
    """`merge_chosen` into [B, H, S, D], whose last axis is dense."""
    B, H, pairs, D = outs.shape
    S = firsts.shape[2] - 1
    if out.numel():
        _merge[triton.cdiv(S, 8), H, B](
            outs.contiguous(), lses.float().contiguous(), places.contiguous(), firsts, out, S, pairs,
            *out.stride()[:3], D=D, WIDTH=triton.next_power_of_2(D), N=8, TOGETHER=4, num_warps=4,
        )  # fmt: skip


def merge_chosen(outs: Tensor, lses: Tensor, places: Tensor, firsts: Tensor) -> Tensor:
    """See `polyattn.contract.BlockOps`."""
    out = outs.new_empty(outs.shape[0], firsts.shape[2] - 1, outs.shape[1], outs.shape[3])
    _merged(outs, lses, places, firsts, out.transpose(1, 2))
    return out
