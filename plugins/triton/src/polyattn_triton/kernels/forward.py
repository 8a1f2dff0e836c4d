"""Forward of dense and packed attention: one program for each tile of queries, FlashAttention-2's loop over the keys.

Tiles are numbered so that (batch, head) pairs whose keys fit in the L2 cache together run together, and, where the
work of a tile grows with its position, the longest come first.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn_triton import runtime
from polyattn_triton.kernels import rules  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rules import (
    accumulate,
    dot,
    end_key,
    first_key,
    logits,
    natural_lse,
    share,
    share_with_sink,
)
from polyattn_triton.kernels.tiles import Spec, architecture, block, hidden, parts, place, put, span

__all__ = ["Config", "describable", "descriptor", "forward", "mask_arguments", "strides_of"]


@triton.jit
def _tile(
    query, k1, k2, v1, v2, out, lse, attn_mask, sinks, cu_q, cu_k,
    sqz, sqm, sqh, skz, skm, skh, svz, svm, svh, soz, som, soh, slz, slm, slh, smz, smh, smm, smn,
    number, pair, heads, s_q, s_k, left, right, chunk, scale, softcap,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    GROUP: tl.constexpr, PACK: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A pair is a sequence with a query head, or, where PACK > 1, with all the query heads of a key head.
    z = pair // heads
    head = pair - z * heads
    head_k = head if PACK > 1 else head // GROUP
    first_q, s_q = span(cu_q, z, s_q)
    first_k, s_k = span(cu_k, z, s_k)
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
        # Some row sees keys in [key_from, key_to); every row sees those in [whole_from, whole_to).
        key_from = first_key(lowest, left, chunk, LEFT, CHUNK) // N * N
        key_to = end_key(highest, s_k, right, RIGHT)
        whole_from = first_key(highest, left, chunk, LEFT, CHUNK)
        whole_to = end_key(lowest, s_k, right, RIGHT)

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
            k1 += z64 * skz + first_k.to(tl.int64) * skm + head_k.to(tl.int64) * skh
            v1 += z64 * svz + first_k.to(tl.int64) * svm + head_k.to(tl.int64) * svh
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
                found = logits(found, scale, softcap, SOFTCAP)
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
        at = z64 * soz + row * som + h * soh
        dtype = out.dtype.element_ty
        put(out, at, valid, cast(acc1 * kept[:, None], dtype), 0, E1, E)
        if E2:
            put(out, at, valid, cast(acc2 * kept[:, None], dtype), E1, E2, E)


@triton.jit(do_not_specialize=["tiles", "pairs", "together", "heads", "s_q", "s_k", "left", "right", "chunk"])
def _forward(
    query, k1, k2, v1, v2, out, lse, attn_mask, sinks, cu_q, cu_k,
    sqz, sqm, sqh, skz, skm, skh, svz, svm, svh, soz, som, soh, slz, slm, slh, smz, smh, smm, smn,
    tiles, pairs, together, heads, s_q, s_k, left, right, chunk, scale, softcap,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    GROUP: tl.constexpr, PACK: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        for pid in range(tl.program_id(0), tiles * pairs, tl.num_programs(0)):
            number, pair = place(pid, tiles, pairs, together, RIGHT)
            _tile(
                query, k1, k2, v1, v2, out, lse, attn_mask, sinks, cu_q, cu_k,
                sqz, sqm, sqh, skz, skm, skh, svz, svm, svh, soz, som, soh, slz, slm, slh, smz, smh, smm, smn,
                number, pair, heads, s_q, s_k, left, right, chunk, scale, softcap,
                D, D1, D2, E, E1, E2, GROUP, PACK, TOP_LEFT, LEFT, RIGHT, CHUNK, SOFTCAP, MASK, FOLD,
                M, N, TMA, STAGES,
            )  # fmt: skip
    else:
        # Not a loop of one turn: that takes 30 registers more.
        number, pair = place(tl.program_id(0), tiles, pairs, together, RIGHT)
        _tile(
            query, k1, k2, v1, v2, out, lse, attn_mask, sinks, cu_q, cu_k,
            sqz, sqm, sqh, skz, skm, skh, svz, svm, svh, soz, som, soh, slz, slm, slh, smz, smh, smm, smn,
            number, pair, heads, s_q, s_k, left, right, chunk, scale, softcap,
            D, D1, D2, E, E1, E2, GROUP, PACK, TOP_LEFT, LEFT, RIGHT, CHUNK, SOFTCAP, MASK, FOLD,
            M, N, TMA, STAGES,
        )  # fmt: skip


class Config(NamedTuple):
    """How a launch is cut: rows of a tile of queries and of a block of keys, and how a program runs.

    Attributes:
        m, n: rows. warps, stages: of a program. tma: keys and values by tensor descriptors.
        persistent: as many programs as the device runs at a time, each with several tiles.
    """

    m: int
    n: int
    warps: int
    stages: int
    tma: bool = False
    persistent: bool = False


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
_TOGETHER = 24 << 20
"""Bytes of keys and values that programs running at one time may share in the L2 cache."""


@functools.cache
def _config(device: torch.device, itemsize: int, width: int, rows: int) -> Config:
    """The configuration for tiles of a device; `rows`: a power of two that few enough queries fit into, or 0."""
    where = architecture(device)
    size = 4 if where == "interpreter" else itemsize
    found = next(
        config
        for name in (where, "")
        for (arch, bytes_, widest), config in _CONFIGS.items()
        if arch == name and bytes_ == size and width <= widest
    )
    if rows and rows < found.m:
        return found._replace(m=rows, n=min(found.n, 64), warps=4, persistent=False)
    return found


def _few(rows: int) -> int:
    """A power of two for a tile of few rows; 0 = not few."""
    return 0 if rows > 64 else max(16, 1 << (rows - 1).bit_length())


def descriptor(
    tensor: Tensor, strides: tuple[int, int, int], sizes: tuple[int, int, int], rows: int, width: int
) -> Any:
    """A tensor descriptor [B, S, H, D] whose blocks are `rows` tokens of one head; strides and sizes of (B, S, H)."""
    return TensorDescriptor(tensor, [*sizes, tensor.shape[-1]], [*strides, 1], [1, rows, 1, width])


def describable(tensor: Tensor, strides: tuple[int, int, int]) -> bool:
    """Whether a tensor can be described: the start and every stride on a boundary of 16 bytes."""
    z, m, h = strides
    return not (tensor.data_ptr() & 15 or (z | m | h) * tensor.itemsize & 15) and z > 0 and m > 0 and h > 0


def strides_of(tensor: Tensor, layout: str) -> tuple[int, int, int]:
    """Strides of (sequence, token, head) for layout BSHD, BHSD or THD."""
    if layout == "BSHD":
        z, m, h, _ = tensor.stride()
        return z, m, h
    if layout == "BHSD":
        z, h, m, _ = tensor.stride()
        return z, m, h
    m, h, _ = tensor.stride()
    return 0, m, h


def mask_arguments(attn_mask: Tensor | None) -> tuple[int, Tensor | None, tuple[int, int, int, int]]:
    """(kind, tensor, strides) of a mask [B|1, H|1, S_q, S_k]; an axis that is shared has a stride of 0."""
    if attn_mask is None:
        return 0, None, (0, 0, 0, 0)
    z, h, m, n = attn_mask.stride()
    strides = (z if attn_mask.shape[0] > 1 else 0, h if attn_mask.shape[1] > 1 else 0, m, n)
    if attn_mask.dtype == torch.bool:
        return 1, attn_mask.view(torch.uint8), strides
    return 2, attn_mask, strides


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
    if layout == "THD":
        assert cu_seqlens_q is not None
        batch, s_q, s_k = cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k
        heads, heads_k = query.shape[1], key.shape[1]
    elif layout == "BSHD":
        batch, s_q, heads, _ = query.shape
        _, s_k, heads_k, _ = key.shape
    else:
        batch, heads, s_q, _ = query.shape
        _, heads_k, s_k, _ = key.shape
    if not (batch and heads and s_q):
        return
    group = heads // heads_k
    width_k, width_v = query.shape[-1], value.shape[-1]
    few = _few(s_q * group)
    config = config or _config(query.device, query.itemsize, max(width_k, width_v), few)
    # One tile for the query heads of a key head, where a tile of one head would be half empty.
    pack = group if 2 * s_q <= config.m else 1
    kind, mask, mask_strides = mask_arguments(attn_mask)
    pairs, heads = (batch * heads_k, heads_k) if pack > 1 else (batch * heads, heads)
    tiles = -(-s_q * pack // config.m)
    together = max(1, _TOGETHER // max(1, s_k * (width_k + width_v) * key.itemsize)) * (1 if pack > 1 else group)
    key_strides, value_strides = strides_of(key, layout), strides_of(value, layout)
    d1, d2 = parts(width_k)
    e1, e2 = parts(width_v)
    tma = config.tma and layout != "THD" and s_k >= config.n
    tma = tma and describable(key, key_strides) and describable(value, value_strides)
    k1, k2, v1, v2 = key, key, value, value
    if tma:
        sizes = (batch, s_k, heads_k)
        k1 = k2 = descriptor(key, key_strides, sizes, config.n, d1)
        v1 = v2 = descriptor(value, value_strides, sizes, config.n, e1)
        k2 = descriptor(key, key_strides, sizes, config.n, d2) if d2 else k1
        v2 = descriptor(value, value_strides, sizes, config.n, e2) if e2 else v1
    # A scale above 0 is left to the softmax; below, the largest product is not the largest logit.
    fold = not spec.softcap and spec.scale > 0 and kind != 2
    scale, softcap = rules.scales(spec.scale, spec.softcap)
    grid = tiles * pairs
    if config.persistent:
        grid = min(grid, runtime.processors(query.device))
    _forward[(grid,)](
        query, k1, k2, v1, v2, out, lse, mask, sinks, cu_seqlens_q, cu_seqlens_k,
        *strides_of(query, layout), *key_strides, *value_strides, *strides_of(out, layout),
        *((0, 0, 0) if lse is None else strides_of(lse.unsqueeze(-1), layout)), *mask_strides,
        tiles, pairs, together, heads, s_q, s_k, spec.left, spec.right, spec.chunk, scale, softcap,
        D=width_k, D1=d1, D2=d2, E=width_v, E1=e1, E2=e2, GROUP=group, PACK=pack,
        TOP_LEFT=spec.top_left, LEFT=spec.left >= 0, RIGHT=spec.right >= 0, CHUNK=spec.chunk > 0,
        SOFTCAP=spec.softcap > 0, MASK=kind, FOLD=fold, M=config.m, N=config.n, TMA=tma, STAGES=config.stages,
        PERSISTENT=config.persistent, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
