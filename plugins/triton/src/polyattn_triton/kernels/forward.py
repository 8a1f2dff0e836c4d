"""Forward of dense and packed attention: one program for each tile of queries, FlashAttention-2's loop over the keys.

Tiles are numbered so that (batch, head) pairs whose keys fit in the L2 cache together run together, and, where the
work of a tile grows with its position, the longest come first.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn.contract import Key
from polyattn_triton.kernels.arguments import (
    configured,
    constants_of,
    covers,
    describable,
    descriptor,
    mask_arguments,
    near,
    numbers_of,
    sizes_of,
    strides_of,
    units_of,
)
from polyattn_triton.kernels.choices import EPOCH, chosen
from polyattn_triton.kernels.room import TOO_LARGE, Loop, Room, refuse
from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rules import accumulate, dot, logits, natural_lse, share, share_with_sink
from polyattn_triton.kernels.tiles import Spec, block, head_at, hidden, put, reach, steps, tile_at
from polyattn_triton.records.tuned import FORWARD

__all__ = ["Config", "forward"]


_COUNTS = ["tiles", "pairs", "together", "heads", "s_q", "s_k", "left", "right", "chunk"]
# Strides come in units (`arguments.units_of`): a version for each would gain nothing.
_STRIDES = [f"s{tensor}{axis}" for tensor in "qkvo" for axis in "zmh"]


@triton.jit(do_not_specialize=_STRIDES + _COUNTS)
def _forward(
    query, k1, k2, v1, v2, out, lse, attn_mask, sinks, cu_q, cu_k,
    sqz, sqm, sqh, skz, skm, skh, svz, svm, svh, soz, som, soh, slz, slm, slh, smz, smh, smm, smn,
    tiles, pairs, together, heads, s_q, s_k, left, right, chunk, scale, softcap,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    GROUP: tl.constexpr, PACK: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr, UNIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sqz, sqm, sqh = steps(sqz, sqm, sqh, UNIT)
    skz, skm, skh = steps(skz, skm, skh, UNIT)
    svz, svm, svh = steps(svz, svm, svh, UNIT)
    # A head is one of queries, or, where PACK > 1, one of keys, with all the query heads that share it.
    number, z, head, first_q, s_q, first_k, s_k = tile_at(tiles, pairs, together, heads, cu_q, cu_k, s_q, s_k, RIGHT)
    head_k = head if PACK > 1 else head // GROUP
    m = number * M
    if m < s_q * PACK:
        # Row r of the tile is query i of head h. Rows past the end repeat the last one.
        valid = m + tl.arange(0, M) < s_q * PACK
        r = tl.minimum(m + tl.arange(0, M), s_q * PACK - 1)
        i = r // PACK
        h = (head * PACK + r - i * PACK).to(tl.int64)
        shift = 0 if TOP_LEFT else s_k - s_q
        p = i + shift
        lowest = m // PACK + shift
        highest = tl.minimum(m + M - 1, s_q * PACK - 1) // PACK + shift
        key_from, key_to, whole_from, whole_to = reach(lowest, highest, s_k, left, right, chunk, N, LEFT, RIGHT, CHUNK)
        z64 = z.to(tl.int64)
        row = first_q.to(tl.int64) + i
        at = query + (z64 * sqz + row * sqm + h * sqh)[:, None]
        c = tl.arange(0, D1)
        q1 = tl.load(at + c[None, :], mask=(c < D)[None, :], other=0.0)
        if D2:
            c = D1 + tl.arange(0, D2)
            q2 = tl.load(at + c[None, :], mask=(c < D)[None, :], other=0.0)
        mask = attn_mask
        if MASK:
            mask = attn_mask + (z64 * smz + i.to(tl.int64) * smm + h * smh)[:, None]
        if not TMA:
            k1 = head_at(k1, z, first_k, head_k, skz, skm, skh)
            v1 = head_at(v1, z, first_k, head_k, svz, svm, svh)
            k2 = k1
            v2 = v1

        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc1 = tl.zeros((M, E1), tl.float32)
        if E2:
            acc2 = tl.zeros((M, E2), tl.float32)
        for n in tl.range(key_from, key_to, N, num_stages=STAGES):
            k = block(k1, z, head_k, n, skm, s_k, N, 0, D1, D, TMA)
            found = dot(q1, k.T)
            if D2:
                k = block(k2, z, head_k, n, skm, s_k, N, D1, D2, D, TMA)
                found = dot(q2, k.T, found)
            if not FOLD:
                found = logits(found, scale, softcap, SOFTCAP, q1.dtype)
            j = (n + tl.arange(0, N))[None, :]
            partly = (n < whole_from) | (n + N > whole_to)
            found = hidden(found, p[:, None], j, mask, smn, s_k, left, right, chunk, partly, LEFT, RIGHT, CHUNK, MASK)
            weights, factor, top, total = accumulate(top, total, found, scale if FOLD else 1.0)
            v = block(v1, z, head_k, n, svm, s_k, N, 0, E1, E, TMA)
            weights = cast(weights, v.dtype)
            acc1 = dot(weights, v, acc1 * factor[:, None])
            if E2:
                v = block(v2, z, head_k, n, svm, s_k, N, E1, E2, E, TMA)
                acc2 = dot(weights, v, acc2 * factor[:, None])

        if lse is not None:
            tl.store(lse + z64 * slz + row * slm + h * slh, natural_lse(top, total), mask=valid)
        if sinks is None:
            kept = share(total)
        else:
            kept = share_with_sink(top, total, tl.load(sinks + h).to(tl.float32))
        oz, om, oh = steps(soz, som, soh, UNIT)
        at = z64 * oz + row * om + h * oh
        dtype = out.dtype.element_ty
        put(out, at, valid, cast(acc1 * kept[:, None], dtype), 0, E1, E)
        if E2:
            put(out, at, valid, cast(acc2 * kept[:, None], dtype), E1, E2, E)


class Config(NamedTuple):
    """How a launch is cut: rows of a tile of queries and of a block of keys, and how a program runs.

    Attributes:
        m, n: rows. warps, stages: of a program. tma: keys and values by tensor descriptors.
    """

    m: int
    n: int
    warps: int
    stages: int
    tma: bool = False


# (architecture, bytes of a number, widest of D and D_v up to): by measurement on an H200, elsewhere by what fits.
_CONFIGS = {
    ("hopper", 2, 64): Config(128, 128, 8, 2, tma=True),
    ("hopper", 2, 128): Config(128, 128, 8, 2, tma=True),
    ("hopper", 2, 192): Config(128, 128, 8, 2, tma=True),
    ("hopper", 2, 256): Config(128, 64, 8, 2, tma=True),
    ("", 2, 64): Config(128, 64, 8, 2),
    ("", 2, 128): Config(128, 64, 8, 2),
    ("", 2, 256): Config(64, 32, 8, 2),
    ("", 4, 64): Config(64, 32, 4, 1),
    ("", 4, 256): Config(32, 32, 8, 1),
    ("interpreter", 4, 256): Config(64, 64, 4, 1),
}


_SHRINKS = (("stages", 2), ("n", 32), ("m", 64), ("stages", 1), ("n", 16), ("m", 16))


def _room(itemsize: int, dims: tuple[int, int], loose: bool, mask: int) -> Room:
    """What a configuration needs. Loose rows are not loaded ahead."""
    cut = [covers(width, loose) for width in dims]
    (d, e), widest = map(sum, cut), max(map(max, cut))

    def loop(c: Config) -> Loop:
        held, step, once = c.m * d * itemsize, c.n * (d + e) * itemsize, c.n * widest * itemsize
        return Loop(c.m, c.n, c.warps, 1 if loose else c.stages, held, step, once, itemsize, mask)

    return Room(loop, _SHRINKS)


def _key(dtype: torch.dtype, dims: tuple[int, int], few: int, loose: bool) -> Key:
    return (str(dtype).removeprefix("torch."), *dims, few, loose)


@functools.cache
def _config(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], few: int, loose: bool, _: int, mask: int = 0
) -> Config:
    """The configuration for tiles of a device; asked again when what is tuned may have changed.

    Args:
        few: a power of two that few enough queries fit into, or 0. loose: see `arguments.units_of`.
        mask: bytes of its numbers, 0 = there is none.
    """
    found = configured(_CONFIGS, device, dtype.itemsize, max(dims))
    if few and few < found.m:
        found = found._replace(m=few, n=min(found.n, 64), warps=4)
    elif loose:
        # Loads of one number each take registers.
        found = found._replace(n=min(found.n, 64))
    rooms = (_room(dtype.itemsize, dims, loose, mask),)
    return chosen(FORWARD, _key(dtype, dims, few, loose), found, device, rooms, mask)


def _few(rows: int) -> int:
    """A power of two for a tile of few rows; 0 = not few."""
    return 0 if rows > 64 else max(16, 1 << (rows - 1).bit_length())


@runtime.on_its_device
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    spec: Spec,
    layout: str,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    config: Config | None = None,
) -> None:
    """Write `out`, and `lse` where it is given.

    Args:
        query, key, value, out: [B, S, H, D] for layout BSHD, [B, H, S, D] for BHSD, [T, H, D] for THD; dense last axis.
        lse: float32, shaped as `out` without its last axis.
        attn_mask: [B|1, H_q|1, S_q, S_k], bool or floating.
        sinks: [H_q] logits.
        cu_seqlens_q, cu_seqlens_k: int32 [N+1], and max_seqlen_q, max_seqlen_k: layout THD only.
        config: instead of that of the table.
    """
    sizes = sizes_of(query, key, value, layout, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    batch, heads, heads_k, s_q, s_k, width, v_width = sizes
    if not (batch and heads and s_q):
        return
    unit, loose, strides = units_of(query, key, value, out, layout=layout)
    kind, mask, mask_strides = mask_arguments(attn_mask)
    few, mask_bytes, given = _few(s_q * sizes.group), 0 if mask is None else mask.itemsize, config
    if config is None:
        config = _config(query.device, query.dtype, (width, v_width), few, loose, EPOCH.value, mask_bytes)
    # One tile for the query heads of a key head, where a tile of one head would be half empty.
    pack = sizes.group if 2 * s_q <= config.m else 1
    pairs, heads = (batch * heads_k, heads_k) if pack > 1 else (batch * heads, heads)
    tiles = -(-s_q * pack // config.m)
    together = near(s_k, sizes, key.itemsize) * (1 if pack > 1 else sizes.group)
    constants = constants_of(spec, sizes, kind, unit, loose)
    tma = config.tma and layout != "THD" and s_k >= config.n
    tma = tma and describable(key, layout) and describable(value, layout)
    k1, k2, v1, v2 = key, key, value, value
    if tma:
        boxes = ((key, "D1"), (key, "D2"), (value, "E1"), (value, "E2"))
        k1, k2, v1, v2 = (
            # A second part that does not exist is not read.
            descriptor(tensor, layout, (batch, s_k, heads_k), config.n, constants[part] or constants[part[0] + "1"])
            for tensor, part in boxes
        )
    try:
        _forward[(tiles * pairs,)](
            query, k1, k2, v1, v2, out, lse, mask, sinks, cu_seqlens_q, cu_seqlens_k, *strides,
            *((0, 0, 0) if lse is None else strides_of(lse.unsqueeze(-1), layout)), *mask_strides,
            tiles, pairs, together, heads, *numbers_of(spec, sizes), **constants, PACK=pack, M=config.m, N=config.n,
            TMA=tma, STAGES=config.stages, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    except TOO_LARGE as error:
        asked = _key(query.dtype, (width, v_width), few, loose)
        refuse(FORWARD, asked, mask_bytes, query.device, config, error, last=given is not None)
        forward(
            query, key, value, out, lse, spec=spec, layout=layout, attn_mask=attn_mask, sinks=sinks,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        )  # fmt: skip
