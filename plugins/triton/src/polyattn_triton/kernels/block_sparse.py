"""Block-sparse attention: each block of queries sees a list of key blocks. Forward, and backward without atomics.

A program owns one tile of queries and walks its block's list, so time goes with what is listed: 4 * D * block_q *
block_k FLOPs an entry. Keys come from the L2 cache, and a tile of M queries has M FLOPs for each byte of them in 16
bits: with blocks of 64 it is that traffic which limits, before the tensor cores do.

Gradients of keys and values need the lists the other way round: which query blocks list a key block. `transposed`
makes them on the device, ascending, so that every sum has one order and results are the same bits on every run.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.adapters import aligned, launch_slices
from polyattn.contract import Key
from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

from polyattn_triton.kernels.choices import EPOCH, chosen
from polyattn_triton.kernels.room import TOO_LARGE, Loop, Room, refuse
from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rules import LOG2E, accumulate, dot, natural_lse, share
from polyattn_triton.kernels.tiles import architecture
from polyattn_triton.records.tuned import BLOCK_SPARSE

__all__ = ["Lists", "Tiles", "backward", "forward", "head_at", "tiles_for", "transposed"]


@triton.jit
def _entry(
    entries, valid, i, end, length, BLOCK: tl.constexpr, N: tl.constexpr, VALID: tl.constexpr, STARTS: tl.constexpr
):
    """(first row, how many rows there are from it) of step i of a list; a step is N rows of a block.

    STARTS: entries are the first rows of blocks, and `valid` is a list too (`placed`).

    Loops ask one step ahead: a load whose address waits for another load is what Triton's pipeline has no room for.
    Past the end nothing is read.
    """
    number = tl.load(entries + i // (BLOCK // N), mask=i < end, other=0)
    part = i % (BLOCK // N) * N
    if STARTS:
        first = number
        limit = tl.load(valid + i // (BLOCK // N), mask=i < end, other=0) - part
    else:
        first = number * BLOCK
        limit = length - first - part
        if VALID:
            limit = tl.minimum(limit, tl.load(valid + number, mask=i < end, other=0) - part)
    return first + part, limit


@triton.jit
def _rows(source, b, h, start, limit, stride, N: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr, SOME: tl.constexpr):
    """Rows start ... start + N of one head. SOME: there may be fewer, and what is past the head's end is zeros.

    `source`: a descriptor of [B, H, S, D], which looks after that itself, or a pointer to the head's first row.
    """
    if TMA:
        found = source.load([b, h, start, 0]).reshape([N, D])
    else:
        n = tl.arange(0, N)[:, None]
        at = source + start.to(tl.int64) * stride + (n * stride + tl.arange(0, D)[None, :])
        found = tl.load(at, mask=n < limit, other=0.0) if SOME else tl.load(at)
    return found


@triton.jit
def head_at(source, b, h, stride_b, stride_h):
    """The first row of a head."""
    return source + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h


_FREE = [
    "c_b",
    "c_h",
    "i_b",
    "i_h",
    "i_q",
    "i_k",
    "p_b",
    "p_h",
    "l_b",
    "l_h",
    "s_q",
    "s_k",
    "key_blocks",
    "query_blocks",
]
"""Strides of lists and LSEs, and sizes: knowing what divides them makes no program better."""


@triton.jit(do_not_specialize=_FREE)
def _forward(
    query, key, value, out, lse, counts, indices, valid, scale,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, c_b, c_h, i_b, i_h, i_q, s_q, s_k,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, VALID: tl.constexpr, STARTS: tl.constexpr,
    EDGE: tl.constexpr, NEGATIVE: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One tile of M queries. `scale`: |scale| * log2(e). EDGE: a step may hold fewer than N keys, or none."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block, kv_head = tile // (BLOCK_Q // M), head // GROUP
    m, d, n = tile * M + tl.arange(0, M), tl.arange(0, D), tl.arange(0, N)
    inside = m[:, None] < s_q
    q_at = head_at(query, b, head, q_b, q_h) + m[:, None].to(tl.int64) * q_s + d[None, :]
    q = tl.load(q_at, mask=inside, other=0.0)
    if NEGATIVE:
        # A scale above 0 keeps the largest product the largest logit.
        q = cast(-q.to(tl.float32), q.dtype)
    keys = key if TMA else head_at(key, b, kv_head, k_b, k_h)
    values = value if TMA else head_at(value, b, kv_head, v_b, v_h)
    end = tl.load(head_at(counts, b, head, c_b, c_h) + block) * (BLOCK_K // N)
    entries = head_at(indices, b, head, i_b, i_h) + block.to(tl.int64) * i_q
    if STARTS:
        valid = head_at(valid, b, head, i_b, i_h) + block.to(tl.int64) * i_q
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    start, limit = _entry(entries, valid, 0, end, s_k, BLOCK_K, N, VALID, STARTS)
    for i in tl.range(0, end, num_stages=STAGES):
        next_start, next_limit = _entry(entries, valid, i + 1, end, s_k, BLOCK_K, N, VALID, STARTS)
        k = _rows(keys, b, kv_head, start, limit, k_s, N, D, TMA, EDGE)
        products = dot(q, tl.trans(k))
        if EDGE:
            products = tl.where(n[None, :] < limit, products, float("-inf"))
        weights, factor, top, total = accumulate(top, total, products, scale)
        v = _rows(values, b, kv_head, start, limit, v_s, N, D, TMA, EDGE)
        acc = dot(cast(weights, v.dtype), v, acc * factor[:, None])
        start, limit = next_start, next_limit
    o_at = head_at(out, b, head, o_b, o_h) + m[:, None].to(tl.int64) * o_s + d[None, :]
    tl.store(o_at, cast(acc * share(total)[:, None], out.dtype.element_ty), mask=inside)
    if LSE:
        at = lse + (b.to(tl.int64) * tl.num_programs(1) + head) * s_q + m
        tl.store(at, natural_lse(top, total), mask=m < s_q)


@triton.jit(do_not_specialize=_FREE)
def _backward_query(
    dout, query, key, value, out, lse, dquery, delta, level, counts, indices, valid, scale,
    g_b, g_h, g_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, l_b, l_h, l_s,
    c_b, c_h, i_b, i_h, i_q, s_q, s_k,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, VALID: tl.constexpr, STARTS: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """dquery of one tile of M queries; for `_backward_key` also their rowsum(dout * out), and their LSE in base 2."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block, kv_head = tile // (BLOCK_Q // M), head // GROUP
    m, d, n = tile * M + tl.arange(0, M), tl.arange(0, D), tl.arange(0, N)
    far, inside = m[:, None].to(tl.int64), m[:, None] < s_q
    q = tl.load(head_at(query, b, head, q_b, q_h) + far * q_s + d[None, :], mask=inside, other=0.0)
    g = tl.load(head_at(dout, b, head, g_b, g_h) + far * g_s + d[None, :], mask=inside, other=0.0)
    o = tl.load(head_at(out, b, head, o_b, o_h) + far * o_s + d[None, :], mask=inside, other=0.0)
    outer = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    total = tl.load(head_at(lse, b, head, l_b, l_h) + m.to(tl.int64) * l_s, mask=m < s_q, other=float("-inf"))
    # A row that sees no key, or that there is none of, has no weights: exp2(x - inf) = 0.
    base = tl.where(total == float("-inf"), float("inf"), total * LOG2E)
    row = b.to(tl.int64) * tl.num_programs(1) + head
    at = row * (tl.num_programs(0) * M) + m
    tl.store(delta + at, outer)
    tl.store(level + at, base)
    keys = key if TMA else head_at(key, b, kv_head, k_b, k_h)
    values = value if TMA else head_at(value, b, kv_head, v_b, v_h)
    end = tl.load(head_at(counts, b, head, c_b, c_h) + block) * (BLOCK_K // N)
    entries = head_at(indices, b, head, i_b, i_h) + block.to(tl.int64) * i_q
    if STARTS:
        valid = head_at(valid, b, head, i_b, i_h) + block.to(tl.int64) * i_q
    dq = tl.zeros([M, D], tl.float32)
    start, limit = _entry(entries, valid, 0, end, s_k, BLOCK_K, N, VALID, STARTS)
    for i in tl.range(0, end, num_stages=STAGES):
        next_start, next_limit = _entry(entries, valid, i + 1, end, s_k, BLOCK_K, N, VALID, STARTS)
        k = _rows(keys, b, kv_head, start, limit, k_s, N, D, TMA, EDGE)
        v = _rows(values, b, kv_head, start, limit, v_s, N, D, TMA, EDGE)
        found = dot(q, tl.trans(k)) * (scale * LOG2E) - base[:, None]
        if EDGE:
            found = tl.where(n[None, :] < limit, found, float("-inf"))
        ds = tl.exp2(found) * (dot(g, tl.trans(v)) - outer[:, None])
        dq = dot(cast(ds, k.dtype), k, dq)
        start, limit = next_start, next_limit
    tl.store(dquery + (row * s_q + far) * D + d[None, :], cast(dq * scale, dquery.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_FREE)
def _backward_key(
    dout, query, key, value, dkey, dvalue, delta, level, counts, indices, valid, starts, scale,
    g_b, g_h, g_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, c_b, c_h, i_b, i_h, i_k, p_b, p_h, above, most,
    s_q, s_k, padded,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, VALID: tl.constexpr, STARTS: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """dkey and dvalue of one tile of N keys: over the query heads of its group, over the query blocks that list it.

    `padded`: rows of `delta` and `level`. EDGE: a step may hold fewer than M queries, or none.
    """
    tile, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = tile // (BLOCK_K // N)
    n, d, end = tile * N + tl.arange(0, N), tl.arange(0, D), s_k
    ours = tile >= 0
    if STARTS:
        # Blocks of few keys are for programs with small tiles, the others for those with large ones.
        size = tl.load(head_at(valid, b, kv_head, p_b, p_h) + block)
        ours = (size > above) & (size <= most) & (tile % (BLOCK_K // N) * N < size)
        first = tl.load(head_at(starts, b, kv_head, p_b, p_h) + block)
        n += first - block * BLOCK_K
        end = tl.where(ours, first + size, 0)
    elif VALID:
        end = tl.minimum(end, block * BLOCK_K + tl.load(valid + block))
    far, inside = n[:, None].to(tl.int64), n[:, None] < end
    k = tl.load(head_at(key, b, kv_head, k_b, k_h) + far * k_s + d[None, :], mask=inside, other=0.0)
    v = tl.load(head_at(value, b, kv_head, v_b, v_h) + far * v_s + d[None, :], mask=inside, other=0.0)
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, D], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        queries = query if TMA else head_at(query, b, head, q_b, q_h)
        grads = dout if TMA else head_at(dout, b, head, g_b, g_h)
        steps = tl.load(head_at(counts, b, head, c_b, c_h) + block) * (BLOCK_Q // M)
        steps = tl.where(ours, steps, 0)
        entries = head_at(indices, b, head, i_b, i_h) + block.to(tl.int64) * i_k
        side = (b.to(tl.int64) * (tl.num_programs(1) * GROUP) + head) * padded + tl.arange(0, M)
        start, limit = _entry(entries, valid, 0, steps, s_q, BLOCK_Q, M, False, False)
        for i in tl.range(0, steps, num_stages=STAGES):
            next_start, next_limit = _entry(entries, valid, i + 1, steps, s_q, BLOCK_Q, M, False, False)
            q = _rows(queries, b, head, start, limit, q_s, M, D, TMA, EDGE)
            base = tl.load(level + side + start)
            # Transposed, so that weights and their gradients are left operands, which may stay in registers.
            weights = tl.exp2(dot(k, tl.trans(q)) * (scale * LOG2E) - base[None, :])
            g = _rows(grads, b, head, start, limit, g_s, M, D, TMA, EDGE)
            dv = dot(cast(weights, g.dtype), g, dv)
            outer = tl.load(delta + side + start)
            ds = weights * (dot(v, tl.trans(g)) - outer[None, :])
            dk = dot(cast(ds, q.dtype), q, dk)
            start, limit = next_start, next_limit
    # Rows past the valid keys were given weights too. Rows of a product do not meet, so it is enough to drop them here.
    at = ((b.to(tl.int64) * tl.num_programs(1) + kv_head) * s_k + far) * D + d[None, :]
    dk = tl.where(inside, dk * scale, 0.0)
    dv = tl.where(inside, dv, 0.0)
    # Without starts a block's rows past the valid ones are nobody's, and 0. With them they may be another block's.
    there = inside if STARTS else n[:, None] < s_k
    tl.store(dkey + at, cast(dk, dkey.dtype.element_ty), mask=there)
    tl.store(dvalue + at, cast(dv, dvalue.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=_FREE)
def _mark(counts, indices, marks, c_b, c_h, i_b, i_h, i_q, key_blocks, WIDE: tl.constexpr):
    """marks[b, h, key block, query block] = 1 where one query block lists it."""
    block, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    listed = tl.load(head_at(counts, b, head, c_b, c_h) + block)
    entries = head_at(indices, b, head, i_b, i_h) + block.to(tl.int64) * i_q
    row = (b.to(tl.int64) * tl.num_programs(1) + head) * key_blocks
    for first in range(0, listed, WIDE):
        i = first + tl.arange(0, WIDE)
        number = tl.load(entries + i, mask=i < listed, other=0)
        tl.store(marks + (row + number) * tl.num_programs(0) + block, 1, mask=i < listed)


@triton.jit(do_not_specialize=_FREE)
def _compact(marks, counts, indices, query_blocks, WIDE: tl.constexpr):
    """The query blocks that list one key block, ascending, and how many they are."""
    block, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (b.to(tl.int64) * tl.num_programs(1) + head) * tl.num_programs(0) + block
    found = block * 0
    for first in range(0, query_blocks, WIDE):
        i = first + tl.arange(0, WIDE)
        marked = tl.load(marks + row * query_blocks + i, mask=i < query_blocks, other=0).to(tl.int32)
        place = found + tl.cumsum(marked, 0) - marked
        tl.store(indices + row * query_blocks + place, i, mask=marked != 0)
        found += tl.sum(marked, 0)
    tl.store(counts + row, found)


def placed(lists: Lists) -> tuple[Tensor, Tensor | None]:
    """What a program reads of a list: numbers of blocks and valid rows of each block; with starts the first row and the
    rows of each entry, in its place. A load whose address waits for two loads is what Triton cannot pipeline.
    """
    starts, valid = lists.starts, lists.valid
    if starts is None or valid is None:
        return lists.indices, valid
    B, H, nQ, most = lists.indices.shape
    B = max(B, starts.shape[0], lists.counts.shape[0])
    H = max(H, lists.counts.shape[1]) if starts.shape[1] == 1 else lists.heads
    listed = torch.arange(most, device=starts.device) < lists.counts[..., None]
    at = torch.where(listed, lists.indices, 0).long().expand(B, H, nQ, most).flatten(2)
    shared = H // starts.shape[1] if starts.shape[1] > 1 else 1
    first, rows = (t.repeat_interleave(shared, 1).expand(B, H, -1).gather(-1, at) for t in (starts, valid))
    return first.view(B, H, nQ, most), rows.view(B, H, nQ, most)


class Lists(NamedTuple):
    """What each query block sees.

    Attributes:
        counts: int32 [B|1, H_q|1, nQ]. indices: int32 [B|1, H_q|1, nQ, max], with dense last axes.
        valid: int32 [nK], or None. block_q, block_k: tokens of a block; the last ones may hold fewer.
        starts: int32 [B|1, H_kv|1, nK], contiguous, the first key of each block; `valid` is like it then. None: the
            blocks cut the keys. heads: H_q, which matters with starts.
    """

    counts: Tensor
    indices: Tensor
    valid: Tensor | None
    block_q: int
    block_k: int
    starts: Tensor | None = None
    heads: int = 1

    def strides(self) -> tuple[int, int, int, int, int]:
        """Elements from list to list, for batches and heads; 0 along an axis that all share."""
        (c_b, c_h), (i_b, i_h, i_q) = _shared(self.counts, 2), _shared(self.indices, 3)
        return c_b, c_h, i_b, i_h, i_q

    def places(self) -> tuple[int, int]:
        """Elements from one sample's or key head's `starts` to the next one's; 0 along an axis that all share."""
        if self.starts is None:
            return 0, 0
        p_b, p_h = _shared(self.starts, 2)
        return p_b, p_h

    def key_blocks(self, keys: int) -> int:
        """How many blocks there are of this many keys."""
        return -(-keys // self.block_k) if self.starts is None else self.starts.shape[2]

    def of(self, samples: slice) -> Lists:
        """Those of some samples; what all share stays shared."""

        def some(t: Tensor) -> Tensor:
            return t if t.shape[0] == 1 else t[samples]

        found = self._replace(counts=some(self.counts), indices=some(self.indices))
        if self.starts is None or self.valid is None:
            return found
        return found._replace(starts=some(self.starts), valid=some(self.valid))


def _shared(tensor: Tensor, axes: int) -> tuple[int, ...]:
    return tuple(0 if tensor.shape[axis] == 1 else tensor.stride(axis) for axis in range(axes))


_FEW = 16
"""Keys of a block that are too few for a large tile."""


class Tiles(NamedTuple):
    """How a program computes: M queries and N keys at a time, its warps, and the stages of its loads."""

    m: int
    n: int
    warps: int
    stages: int


_TABLE = {
    # (architecture, kernel, head dim): for blocks of 128, for blocks of 64 (of queries; `key`: of keys).
    ("hopper", "forward", 64): (Tiles(128, 128, 8, 3), Tiles(64, 64, 4, 3)),
    ("hopper", "forward", 128): (Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 2)),
    ("hopper", "forward", 256): (Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2)),
    ("hopper", "query", 64): (Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3)),
    ("hopper", "query", 128): (Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2)),
    ("hopper", "query", 256): (Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
    ("hopper", "key", 64): (Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 2)),
    ("hopper", "key", 128): (Tiles(32, 128, 8, 2), Tiles(32, 64, 4, 3)),
    ("hopper", "key", 256): (Tiles(16, 64, 8, 2), Tiles(16, 64, 8, 2)),
    ("", "forward", 64): (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3)),
    ("", "forward", 128): (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    ("", "forward", 256): (Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
    ("", "query", 64): (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    ("", "query", 128): (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2)),
    ("", "query", 256): (Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1)),
    ("", "key", 64): (Tiles(32, 64, 4, 2), Tiles(32, 64, 4, 2)),
    ("", "key", 128): (Tiles(32, 64, 4, 2), Tiles(32, 64, 4, 2)),
    ("", "key", 256): (Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
}


def _key(kernel: str, dtype: torch.dtype, head_dim: int, blocks: tuple[int, int]) -> Key:
    return (kernel, str(dtype).removeprefix("torch."), head_dim, *blocks)


def _room(kernel: str, dtype: torch.dtype, head_dim: int) -> Room:
    """What a kernel's tiles need. Both gradients have two tiles that stay, and load two a step, as `forward` does."""
    row, held = head_dim * dtype.itemsize, 1 if kernel == "forward" else 2

    def loop(t: Tiles) -> Loop:
        rows, columns = (t.n, t.m) if kernel == "key" else (t.m, t.n)
        step = 2 * columns * row
        once, spare = (step // 2, 0) if kernel == "forward" else (step, step // 2)
        return Loop(rows, columns, t.warps, t.stages, held * rows * row, step, once, dtype.itemsize, spare=spare)

    walked, stays = ("m", "n") if kernel == "key" else ("n", "m")
    return Room(loop, (("stages", 2), (walked, 32), (stays, 32), ("stages", 1), (walked, 16), (stays, 16)))


@functools.cache
def _tiles(
    kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int, blocks: tuple[int, int], _: int
) -> Tiles:
    """Asked again when what is tuned may have changed."""
    where = architecture(device)
    block_q, block_k = blocks
    if where == "interpreter":
        # Every step of the interpreter costs the same, whatever its size.
        found = Tiles(block_q, block_k, 4, 1)
    elif dtype == torch.float32:
        # Products that no tensor core takes: all their numbers are in registers.
        found = Tiles(16, 16, 4, 1)
    else:
        large, small = _TABLE[where, kernel, head_dim]
        found = large if (block_k if kernel == "key" else block_q) % 128 == 0 else small
    return chosen(
        BLOCK_SPARSE, _key(kernel, dtype, head_dim, blocks), found, device, (_room(kernel, dtype, head_dim),),
        within=lambda tiles: tiles._replace(m=min(tiles.m, block_q), n=min(tiles.n, block_k)),
    )  # fmt: skip


def tiles_for(kernel: str, query: Tensor, block_q: int, block_k: int) -> Tiles:
    """The configuration of a kernel (`forward`, `query` or `key`: the gradients of queries, or of keys and values)."""
    return _tiles(kernel, query.device, query.dtype, query.shape[-1], (block_q, block_k), EPOCH.value)


def _refuse(kernel: str, query: Tensor, lists: Lists, tiles: Tiles, error: Exception, last: bool) -> None:
    key = _key(kernel, query.dtype, query.shape[-1], (lists.block_q, lists.block_k))
    refuse(BLOCK_SPARSE, key, None, query.device, tiles, error, last=last)


def _described(*tensors: Tensor) -> bool:
    """Whether rows can be loaded by tensor descriptors: the hardware wants 16-byte steps above 0."""
    if architecture(tensors[0].device) != "hopper" or not aligned(*tensors):
        return False
    return all(step for t in tensors for size, step in zip(t.shape, t.stride(), strict=True) if size > 1)


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [1, 1, rows, tensor.shape[-1]])


@runtime.on_its_device
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: Lists,
    *,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    tiles: Tiles | None = None,
    tma: bool | None = None,
) -> None:
    """Attention of each query to the valid tokens of the key blocks that its block lists.

    Args:
        query: [B, H_q, S_q, D]; key, value: [B, H_kv, S_k, D]; out: [B, H_q, S_q, D]; last axes dense.
        lse: float32 [B, H_q, S_q], contiguous; None = not wanted.
        scale: of the products. tiles: instead of the table's. tma: descriptors or not; None = where they work.
    """
    B, H, S_q, D = query.shape
    if len(parts := launch_slices(B, 1)) > 1:
        for some in parts:
            mine = {"out": out[some], "lse": None if lse is None else lse[some], "tiles": tiles, "tma": tma}
            forward(query[some], key[some], value[some], lists.of(some), scale=scale, **mine)
        return
    block_q, block_k = lists.block_q, lists.block_k
    lists = lists._replace(heads=H)
    indices, valid = placed(lists)
    strides = lists._replace(indices=indices).strides()
    t = tiles or tiles_for("forward", query, block_q, block_k)
    by_tma = _described(key, value) if tma is None else tma
    S_k = key.shape[2]
    try:
        _forward[triton.cdiv(S_q, t.m), H, B](
            query, _descriptor(key, t.n) if by_tma else key, _descriptor(value, t.n) if by_tma else value,
            out, lse, lists.counts, indices, valid,
            # 0 times -inf would be NaN; a scale as small as this leaves logits that are 0 as well.
            max(abs(scale), 1e-30) * LOG2E.value,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3], *strides, S_q, S_k,
            GROUP=H // key.shape[1], D=D, BLOCK_Q=block_q, BLOCK_K=block_k, M=t.m, N=t.n,
            STAGES=t.stages, TMA=by_tma, VALID=valid is not None, STARTS=lists.starts is not None,
            EDGE=valid is not None or S_k % block_k != 0, NEGATIVE=scale < 0, LSE=lse is not None,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    except TOO_LARGE as error:
        _refuse("forward", query, lists, t, error, last=tiles is not None)
        forward(query, key, value, lists, scale=scale, out=out, lse=lse, tma=tma)


def transposed(lists: Lists, key_blocks: int) -> Lists:
    """The query blocks that list each key block: counts [B', H', nK], indices [B', H', nK, nQ], ascending; what all
    samples or heads share stays shared. No host knows how long they are, so there is room for the longest."""
    device, query_blocks = lists.counts.device, lists.counts.shape[2]
    B, H = (max(lists.counts.shape[axis], lists.indices.shape[axis]) for axis in (0, 1))
    marks = torch.zeros(B, H, key_blocks, query_blocks, dtype=torch.int8, device=device)
    counts = torch.empty(B, H, key_blocks, dtype=torch.int32, device=device)
    indices = torch.empty(B, H, key_blocks, query_blocks, dtype=torch.int32, device=device)
    with runtime.device_of(marks):
        _mark[query_blocks, H, B](
            lists.counts, lists.indices, marks, *lists.strides(), key_blocks, WIDE=256, num_warps=4
        )  # fmt: skip
        _compact[key_blocks, H, B](marks, counts, indices, query_blocks, WIDE=512, num_warps=4)
    return lists._replace(counts=counts, indices=indices)


@runtime.on_its_device
def backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lists: Lists,
    *,
    scale: float,
    tiles: tuple[Tiles | None, Tiles | None] = (None, None),
    tma: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dquery, dkey, dvalue) of `forward`, contiguous; `out` and `lse` may be those of a merged result.

    Args:
        tiles: of the kernels `query` and `key`, instead of the table's. The rest as `forward`.
    """
    B, H, S_q, D = query.shape
    if len(parts := launch_slices(B, 1)) > 1:
        sides = (dout, query, key, value, out, lse)
        found = [
            backward(*(t[some] for t in sides), lists.of(some), scale=scale, tiles=tiles, tma=tma) for some in parts
        ]
        dquery, dkey, dvalue = (torch.cat(grads) for grads in zip(*found, strict=True))
        return dquery, dkey, dvalue
    H_kv, S_k = key.shape[1:3]
    block_q, block_k = lists.block_q, lists.block_k
    lists = lists._replace(heads=H)
    indices, valid = placed(lists)
    strides = lists._replace(indices=indices).strides()
    query_blocks, key_blocks = lists.counts.shape[2], lists.key_blocks(S_k)
    padded = query_blocks * block_q
    # Keys may be in no block where blocks have starts: nobody writes their gradient.
    made = torch.empty if lists.starts is None else torch.zeros
    dkey, dvalue = (made(t.shape, dtype=t.dtype, device=t.device) for t in (key, value))
    dquery = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    delta, level = (torch.empty(B, H, padded, dtype=torch.float32, device=query.device) for _ in range(2))
    shape: dict[str, Any] = {"GROUP": H // H_kv, "D": D, "BLOCK_Q": block_q, "BLOCK_K": block_k}
    shape |= {"VALID": valid is not None, "STARTS": lists.starts is not None}

    kernel, own = "query", tiles[0]
    try:
        t = own or tiles_for(kernel, query, block_q, block_k)
        by_tma = _described(key, value) if tma is None else tma
        _backward_query[padded // t.m, H, B](
            dout, query, _descriptor(key, t.n) if by_tma else key, _descriptor(value, t.n) if by_tma else value, out,
            lse, dquery, delta, level, lists.counts, indices, valid, scale,
            *dout.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            *lse.stride(), *strides, S_q, S_k, **shape, M=t.m, N=t.n, STAGES=t.stages,
            TMA=by_tma, EDGE=valid is not None or S_k % block_k != 0, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip

        kernel, own = "key", tiles[1]
        t = own or tiles_for(kernel, query, block_q, block_k)
        by_tma = _described(query, dout) if tma is None else tma
        turned = transposed(lists, key_blocks)
        # (tile, keys that a block has more than, and at most): ends of ragged tiles are not computed as whole blocks.
        launches = [(t, 0, block_k)]
        if lists.starts is not None and t.n > _FEW and own is None:
            launches = [(t, _FEW, block_k), (t._replace(n=_FEW), 0, _FEW)]
        for one, above, most in launches:
            tiles_of_keys = triton.cdiv(S_k, one.n) if lists.starts is None else key_blocks * (block_k // one.n)
            _backward_key[tiles_of_keys, H_kv, B](
                _descriptor(dout, one.m) if by_tma else dout, _descriptor(query, one.m) if by_tma else query, key,
                value, dkey, dvalue, delta, level, turned.counts, turned.indices, lists.valid, lists.starts, scale,
                *dout.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *turned.strides(),
                *lists.places(), above, most, S_q, S_k, padded, **shape, M=one.m, N=one.n, STAGES=one.stages,
                TMA=by_tma, EDGE=S_q % block_q != 0, num_warps=one.warps, num_stages=one.stages,
            )  # fmt: skip
    except TOO_LARGE as error:
        _refuse(kernel, query, lists, t, error, last=own is not None)
        return backward(dout, query, key, value, out, lse, lists, scale=scale, tiles=tiles, tma=tma)
    return dquery, dkey, dvalue
