"""Backward of dense and packed attention.

One kernel gives dQ, with a program for each tile of queries, and one dK and dV, with a program for each tile of keys,
or several where those are too few (`shares`), whose sums are added up after it.
Both compute the weights again from the LSE, so that no program adds to another's result: 7 matrix products, and the
same bits on every run. (`hopper.backward` is one launch with 5 products, whose dQ is not the same bits on every run.)

With P = exp(S - lse), dP = dO V^T and delta = rowsum(dO * O):  dV = P^T dO,  dS = P * (dP - delta),
dQ = scale * dS K,  dK = scale * dS^T Q  (FlashAttention-2, algorithm 2). `lse` and O may be those of a merged result.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.contract import Key
from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

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
from polyattn_triton.kernels.gradient_sums import add_up, partial
from polyattn_triton.kernels.room import TOO_LARGE, Loop, Room, refuse
from polyattn_triton.kernels.rounding import cast
from polyattn_triton.kernels.rules import LOG2E, dot, logits
from polyattn_triton.kernels.tiles import Spec, block, head_at, hidden, put, reach, rows_of, steps, tile_at
from polyattn_triton.records.tuned import BACKWARD

__all__ = ["Config", "backward", "narrow", "shares"]

_FEWEST = 8
"""Blocks of rows that a part of a head's has at least (`shares`): its keys are loaded for it, its sums stored."""
ROWS = tl.constexpr(128)
"""No tile of queries has more rows."""


@triton.jit
def _gradient(found, capped, dp, lse, delta, factor, softcap, SOFTCAP: tl.constexpr):
    """(weights, their logits' gradient) from base-2 logits `found` / factor; `capped` are those before any mask."""
    weights = tl.exp2(found * factor - lse)
    change = weights * (dp - delta)
    if SOFTCAP:
        t = capped / (softcap * LOG2E)
        change *= 1 - t * t
    return weights, change


@triton.jit
def _place(cu_seqlens, z, first, length):
    """Where the statistics of sequence z start: at a multiple of ROWS, with room for its last tile."""
    if cu_seqlens is None:
        return (z * ((length + ROWS - 1) // ROWS * ROWS)).to(tl.int64)
    else:
        return (first // ROWS + z).to(tl.int64) * ROWS


_COUNTS = ["padded", "tiles", "pairs", "together", "heads", "s_q", "s_k", "left", "right", "chunk"]


def _strides(tensors: str) -> list[str]:
    """As in forward.py: given in units."""
    return [f"s{tensor}{axis}" for tensor in tensors for axis in "zmh"]


@triton.jit(do_not_specialize=_strides("qkvdog") + _COUNTS)
def _queries(
    query, key, value, dout, out, lse, statistics, dquery, attn_mask, cu_q, cu_k,
    sqz, sqm, sqh, skz, skm, skh, svz, svm, svh, sdz, sdm, sdh, soz, som, soh, slz, slm, slh, sgz, sgm, sgh,
    smz, smh, smm, smn,
    padded, tiles, pairs, together, heads, s_q, s_k, left, right, chunk, scale, softcap, factor,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    GROUP: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr, UNIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries; delta on the way, for the other kernel. Without `dquery`, delta only."""
    sqz, sqm, sqh = steps(sqz, sqm, sqh, UNIT)
    skz, skm, skh = steps(skz, skm, skh, UNIT)
    svz, svm, svh = steps(svz, svm, svh, UNIT)
    sdz, sdm, sdh = steps(sdz, sdm, sdh, UNIT)
    soz, som, soh = steps(soz, som, soh, UNIT)
    number, z, head, first_q, s_q, first_k, s_k = tile_at(tiles, pairs, together, heads, cu_q, cu_k, s_q, s_k, RIGHT)
    m = number * M
    if m < s_q:
        r = m + tl.arange(0, M)
        valid = r < s_q
        r = tl.minimum(r, s_q - 1)
        shift = 0 if TOP_LEFT else s_k - s_q
        p = (r + shift)[:, None]
        lowest = m + shift
        highest = tl.minimum(m + M, s_q) - 1 + shift
        key_from, key_to, whole_from, whole_to = reach(lowest, highest, s_k, left, right, chunk, N, LEFT, RIGHT, CHUNK)
        z64 = z.to(tl.int64)
        h64 = head.to(tl.int64)
        q_at = head_at(query, z, first_q, head, sqz, sqm, sqh)
        if not TMA:
            key = head_at(key, z, first_k, head // GROUP, skz, skm, skh)
            value = head_at(value, z, first_k, head // GROUP, svz, svm, svh)
        d_at = head_at(dout, z, first_q, head, sdz, sdm, sdh)
        o_at = head_at(out, z, first_q, head, soz, som, soh)
        row = first_q.to(tl.int64) + r
        mask = attn_mask
        if MASK:
            mask = attn_mask + (z64 * smz + r.to(tl.int64) * smm + h64 * smh)[:, None]
        q1 = rows_of(q_at, m, sqm, s_q, M, 0, D1, D)
        d1 = rows_of(d_at, m, sdm, s_q, M, 0, E1, E)
        sums = tl.sum(d1.to(tl.float32) * rows_of(o_at, m, som, s_q, M, 0, E1, E).to(tl.float32), 1)
        dq1 = tl.zeros((M, D1), tl.float32)
        if D2:
            q2 = rows_of(q_at, m, sqm, s_q, M, D1, D2, D)
            dq2 = tl.zeros((M, D2), tl.float32)
        if E2:
            d2 = rows_of(d_at, m, sdm, s_q, M, E1, E2, E)
            sums += tl.sum(d2.to(tl.float32) * rows_of(o_at, m, som, s_q, M, E1, E2, E).to(tl.float32), 1)
        # A row without keys, and one past the end, has an LSE of +inf here: all its weights are 0.
        top = tl.load(lse + z64 * slz + row * slm + h64 * slh)
        top = tl.where(valid & (top > float("-inf")), top * LOG2E, float("inf"))
        at = statistics + h64 * padded + _place(cu_q, z, first_q, s_q) + m + tl.arange(0, M)
        tl.store(at, top)
        tl.store(at + heads.to(tl.int64) * padded, sums)
        top = top[:, None]
        sums = sums[:, None]

        for n in tl.range(key_from, key_to, N, num_stages=STAGES):
            k = block(key, z, head // GROUP, n, skm, s_k, N, 0, D1, D, TMA)
            found = dot(q1, k.T)
            if D2:
                kk = block(key, z, head // GROUP, n, skm, s_k, N, D1, D2, D, TMA)
                found = dot(q2, kk.T, found)
            if not FOLD:
                found = logits(found, scale, softcap, SOFTCAP, q1.dtype)
            capped = found
            j = (n + tl.arange(0, N))[None, :]
            partly = (n < whole_from) | (n + N > whole_to)
            found = hidden(found, p, j, mask, smn, s_k, left, right, chunk, partly, LEFT, RIGHT, CHUNK, MASK)
            v = block(value, z, head // GROUP, n, svm, s_k, N, 0, E1, E, TMA)
            dp = dot(d1, v.T)
            if E2:
                v = block(value, z, head // GROUP, n, svm, s_k, N, E1, E2, E, TMA)
                dp = dot(d2, v.T, dp)
            _, change = _gradient(found, capped, dp, top, sums, scale if FOLD else 1.0, softcap, SOFTCAP)
            change = cast(change, k.dtype)
            dq1 = dot(change, k, dq1)
            if D2:
                dq2 = dot(change, kk, dq2)

        gz, gm, gh = steps(sgz, sgm, sgh, UNIT)
        at = z64 * gz + row * gm + h64 * gh
        dtype = dquery.dtype.element_ty
        put(dquery, at, valid, cast(dq1 * factor, dtype), 0, D1, D)
        if D2:
            put(dquery, at, valid, cast(dq2 * factor, dtype), D1, D2, D)


@triton.jit(do_not_specialize=_strides("qkvdgw") + _COUNTS)
def _keys(
    query, key, value, dout, statistics, dkey, dvalue, attn_mask, cu_q, cu_k,
    sqz, sqm, sqh, skz, skm, skh, svz, svm, svh, sdz, sdm, sdh, sgz, sgm, sgh, swz, swm, swh,
    smz, smh, smm, smn,
    padded, tiles, pairs, together, heads, s_q, s_k, left, right, chunk, scale, softcap, factor,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    GROUP: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, FOLD: tl.constexpr, UNIT: tl.constexpr,
    EACH: tl.constexpr, CUTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys, summed over the query heads that share it. Scores are [keys, queries] here.

    A program sums over EACH of those heads, and over one of CUTS parts of their rows: `head` numbers such sums, in
    `dkey` and `dvalue` too.
    """
    sqz, sqm, sqh = steps(sqz, sqm, sqh, UNIT)
    skz, skm, skh = steps(skz, skm, skh, UNIT)
    svz, svm, svh = steps(svz, svm, svh, UNIT)
    sdz, sdm, sdh = steps(sdz, sdm, sdh, UNIT)
    # Under a causal mask the first keys are seen most: they come first as they are.
    number, z, head, first_q, s_q, first_k, s_k = tile_at(tiles, pairs, together, heads, cu_q, cu_k, s_q, s_k, False)
    n = number * N
    if n < s_k:
        j = n + tl.arange(0, N)
        valid = j < s_k
        last = tl.minimum(n + N, s_k) - 1
        shift = 0 if TOP_LEFT else s_k - s_q
        # Some key is seen by rows of [row_from, row_to), every key by those of [whole_from, whole_to).
        row_from = 0
        whole_from = 0
        row_to = s_q
        # Rows past the end have weights of 0 anyway; a tile of keys that is cut short has no whole blocks.
        whole_to = tl.where(n + N > s_k, 0, s_q + M)
        if RIGHT:
            row_from = tl.maximum(n - right - shift, 0)
            whole_from = last - right - shift
        if LEFT:
            row_to = tl.minimum(row_to, last + left - shift + 1)
            whole_to = tl.minimum(whole_to, n + left - shift + 1)
        if CHUNK:
            row_to = tl.minimum(row_to, (last // chunk + 1) * chunk - shift)
            whole_to = tl.minimum(whole_to, (n // chunk + 1) * chunk - shift)
        row_from = row_from // M * M

        if CUTS > 1:
            part = ((row_to - row_from + M - 1) // M + CUTS - 1) // CUTS * M
            row_from += head % CUTS * part
            row_to = tl.minimum(row_to, row_from + part)
        first_head = head // CUTS * EACH

        z64 = z.to(tl.int64)
        k_at = head_at(key, z, first_k, first_head // GROUP, skz, skm, skh)
        v_at = head_at(value, z, first_k, first_head // GROUP, svz, svm, svh)
        k1 = rows_of(k_at, n, skm, s_k, N, 0, D1, D)
        v1 = rows_of(v_at, n, svm, s_k, N, 0, E1, E)
        dk1 = tl.zeros((N, D1), tl.float32)
        dv1 = tl.zeros((N, E1), tl.float32)
        if D2:
            k2 = rows_of(k_at, n, skm, s_k, N, D1, D2, D)
            dk2 = tl.zeros((N, D2), tl.float32)
        if E2:
            v2 = rows_of(v_at, n, svm, s_k, N, E1, E2, E)
            dv2 = tl.zeros((N, E2), tl.float32)
        for g in range(EACH):
            h64 = first_head.to(tl.int64) + g
            q_at = query
            d_at = dout
            if not TMA:
                q_at = head_at(query, z, first_q, h64, sqz, sqm, sqh)
                d_at = head_at(dout, z, first_q, h64, sdz, sdm, sdh)
            at = statistics + h64 * padded + _place(cu_q, z, first_q, s_q)
            for m in tl.range(row_from, row_to, M, num_stages=STAGES):
                i = m + tl.arange(0, M)
                q = block(q_at, z, first_head + g, m, sqm, s_q, M, 0, D1, D, TMA)
                found = dot(k1, q.T)
                if D2:
                    qq = block(q_at, z, first_head + g, m, sqm, s_q, M, D1, D2, D, TMA)
                    found = dot(k2, qq.T, found)
                if not FOLD:
                    found = logits(found, scale, softcap, SOFTCAP, q.dtype)
                capped = found
                top = tl.load(at + i)[None, :]
                mask = attn_mask
                if MASK:
                    rows = tl.minimum(i, s_q - 1).to(tl.int64)
                    mask = attn_mask + (z64 * smz + rows * smm + h64 * smh)[None, :]
                partly = (m < whole_from) | (m + M > whole_to)
                found = hidden(
                    found, (i + shift)[None, :], j[:, None], mask, smn, s_k, left, right, chunk, partly,
                    LEFT, RIGHT, CHUNK, MASK,
                )  # fmt: skip
                d = block(d_at, z, first_head + g, m, sdm, s_q, M, 0, E1, E, TMA)
                dp = dot(v1, d.T)
                if E2:
                    dd = block(d_at, z, first_head + g, m, sdm, s_q, M, E1, E2, E, TMA)
                    dp = dot(v2, dd.T, dp)
                sums = tl.load(at + (heads // CUTS * EACH).to(tl.int64) * padded + i)[None, :]
                weights, change = _gradient(found, capped, dp, top, sums, scale if FOLD else 1.0, softcap, SOFTCAP)
                weights = cast(weights, d.dtype)
                change = cast(change, q.dtype)
                dv1 = dot(weights, d, dv1)
                dk1 = dot(change, q, dk1)
                if E2:
                    dv2 = dot(weights, dd, dv2)
                if D2:
                    dk2 = dot(change, qq, dk2)

        row = first_k.to(tl.int64) + j
        gz, gm, gh = steps(sgz, sgm, sgh, UNIT)
        at = z64 * gz + row * gm + head.to(tl.int64) * gh
        put(dkey, at, valid, cast(dk1 * factor, dkey.dtype.element_ty), 0, D1, D)
        if D2:
            put(dkey, at, valid, cast(dk2 * factor, dkey.dtype.element_ty), D1, D2, D)
        wz, wm, wh = steps(swz, swm, swh, UNIT)
        at = z64 * wz + row * wm + head.to(tl.int64) * wh
        put(dvalue, at, valid, cast(dv1, dvalue.dtype.element_ty), 0, E1, E)
        if E2:
            put(dvalue, at, valid, cast(dv2, dvalue.dtype.element_ty), E1, E2, E)


class Config(NamedTuple):
    """How the two launches are cut: rows of queries and of keys, warps and stages, first for dQ, then for dK and dV.

    Attributes:
        tma: rows by tensor descriptors.
    """

    m: int
    n: int
    warps: int
    stages: int
    keys_m: int
    keys_n: int
    keys_warps: int
    keys_stages: int
    tma: bool = False


# As in forward.py.
_CONFIGS = {
    ("hopper", 2, 64): Config(128, 64, 8, 2, 64, 128, 8, 2, tma=True),
    # Of head dims in two parts 64 keys in four warps lack registers: so says the compiler, no GPU has compared them.
    ("hopper", 2, 96): Config(128, 64, 8, 3, 64, 128, 8, 2, tma=True),
    ("hopper", 2, 128): Config(128, 64, 8, 3, 64, 64, 4, 2, tma=True),
    ("hopper", 2, 256): Config(128, 32, 8, 2, 32, 64, 8, 2, tma=True),
    ("", 2, 64): Config(128, 64, 8, 2, 64, 128, 8, 2),
    ("", 2, 128): Config(64, 64, 8, 2, 32, 64, 4, 2),
    ("", 2, 256): Config(32, 32, 4, 1, 32, 32, 8, 1),
    ("", 4, 64): Config(32, 32, 8, 1, 32, 32, 8, 1),
    ("", 4, 256): Config(16, 16, 4, 1, 16, 16, 4, 1),
    ("interpreter", 4, 256): Config(64, 64, 4, 1, 64, 64, 4, 1),
}


_SHRINKS = (("stages", 2), ("n", 32), ("m", 32), ("stages", 1), ("n", 16), ("m", 16))
_KEYS_SHRINK = (("keys_stages", 2), ("keys_m", 32), ("keys_n", 32), ("keys_stages", 1), ("keys_m", 16), ("keys_n", 16))


def _rooms(itemsize: int, dims: tuple[int, int], loose: bool, mask: int) -> tuple[Room, Room]:
    """What the launches of a configuration need: as in forward.py, but that V and dO are there too."""
    d, e = (sum(covers(width, loose)) * itemsize for width in dims)
    row = d + e

    def queries(c: Config) -> Loop:
        stages, step = 1 if loose else c.stages, c.n * row
        return Loop(c.m, c.n, c.warps, stages, c.m * row, step, step, itemsize, mask, spare=c.n * e)

    def keys(c: Config) -> Loop:
        held, step, stages = c.keys_n * row, c.keys_m * row, 1 if loose else c.keys_stages
        return Loop(c.keys_n, c.keys_m, c.keys_warps, stages, held, step, step, itemsize, mask, spare=c.keys_m * e)

    return Room(queries, _SHRINKS), Room(keys, _KEYS_SHRINK)


def _key(dtype: torch.dtype, dims: tuple[int, int]) -> Key:
    return (str(dtype).removeprefix("torch."), *dims)


@functools.cache
def _config(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], _: int, loose: bool = False, mask: int = 0
) -> Config:
    """As in forward.py."""
    found = configured(_CONFIGS, device, dtype.itemsize, max(dims))
    rooms = _rooms(dtype.itemsize, dims, loose, mask)
    return chosen(BACKWARD, _key(dtype, dims), found, device, rooms, (loose, mask))


def narrow(config: Config, programs: int, processors: int) -> Config:
    """The configuration with half the rows of dQ's tiles, where so many `programs` leave processors idle."""
    if programs >= processors or config.m < 128 or config.warps < 8:
        return config
    return config._replace(m=config.m // 2, warps=config.warps // 2)


def shares(programs: int, group: int, steps: int, processors: int) -> tuple[int, int]:
    """(query heads that a program of dK and dV sums over, parts of their rows): all of them and one, unless `programs`
    would leave processors idle. Then there are fewer heads in each, and of few programs with one head, several parts.

    Args:
        programs: tiles of keys of all key heads. group: query heads of a key head. steps: blocks of a head's rows.
    """
    if programs >= processors:
        return group, 1
    fewer = [each for each in range(group, 0, -1) if not group % each and programs * group // each >= processors]
    if fewer:
        return fewer[0], 1
    parts = max(min(-(-2 * processors // max(programs * group, 1)), steps // _FEWEST), 1)
    return 1, 1 << (parts.bit_length() - 1)  # few numbers, for each of which the kernel is compiled


@runtime.on_its_device
def backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    spec: Spec,
    layout: str,
    attn_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dquery, dkey, dvalue), shaped as their inputs.

    Args:
        out, lse: may belong to a merged result that this call is a part of.
        config: instead of that of the table.
        The others as `kernels.forward.forward`.
    """
    sizes = sizes_of(query, key, value, layout, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    batch, heads, heads_k, s_q, s_k, width, v_width = sizes
    dquery, dkey, dvalue = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if not (batch and heads):
        return dquery, dkey, dvalue
    # Autograd gives expanded gradients too.
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    out = out if out.stride(-1) == 1 else out.contiguous()
    # Base-2 LSE and delta, [2, H_q, rows of all sequences, each from a multiple of ROWS on].
    most = ROWS.value
    padded = (query.shape[0] // most + 1 + batch if layout == "THD" else -(-s_q // most) * batch) * most
    statistics = torch.empty((2, heads, padded), dtype=torch.float32, device=query.device)
    unit, loose, strides = units_of(query, key, value, dout, out, dquery, dkey, dvalue, layout=layout)
    q_s, k_s, v_s, d_s, o_s, dq_s = (strides[i : i + 3] for i in range(0, 18, 3))
    lse_s = strides_of(lse.unsqueeze(-1), layout)
    kind, mask, mask_strides = mask_arguments(attn_mask)
    mask_bytes, given = 0 if mask is None else mask.itemsize, config
    config = asked = config or _config(query.device, query.dtype, (width, v_width), EPOCH.value, loose, mask_bytes)
    processors = runtime.processors(query.device)
    if given is None:
        config = narrow(config, -(-s_q // config.m) * batch * heads, processors)
    programs = -(-s_k // config.keys_n) * batch * heads_k
    each, cuts = shares(programs, sizes.group, -(-s_q // config.keys_m), processors)
    ways, axis = sizes.group // each * cuts, 2 if layout == "BSHD" else 1
    dk, dv = (partial(grad, axis, ways) if ways > 1 else grad for grad in (dkey, dvalue))
    dk_s, dv_s = ([stride // unit for stride in strides_of(grad, layout)] for grad in (dk, dv))
    constants = constants_of(spec, sizes, kind, unit, loose)
    numbers = (*numbers_of(spec, sizes), spec.scale)
    tma = config.tma and layout != "THD" and not (constants["D2"] or constants["E2"]) and min(s_q, s_k) >= most
    tma = tma and all(describable(tensor, layout) for tensor in (query, dout, key, value))
    q, k, v, d = query, key, value, dout
    if tma:
        q = descriptor(query, layout, (batch, s_q, heads), config.keys_m, constants["D1"])
        d = descriptor(dout, layout, (batch, s_q, heads), config.keys_m, constants["E1"])
        k = descriptor(key, layout, (batch, s_k, heads_k), config.n, constants["D1"])
        v = descriptor(value, layout, (batch, s_k, heads_k), config.n, constants["E1"])
    room = 0
    try:
        if tiles := -(-s_q // config.m):
            together = near(s_k, sizes, key.itemsize) * sizes.group
            _queries[(tiles * batch * heads,)](
                query, k, v, dout, out, lse, statistics, dquery, mask, cu_seqlens_q, cu_seqlens_k,
                *q_s, *k_s, *v_s, *d_s, *o_s, *lse_s, *dq_s, *mask_strides,
                padded, tiles, batch * heads, together, heads, *numbers, **constants, M=config.m, N=config.n, TMA=tma,
                STAGES=config.stages, num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        room = 1
        if tiles := -(-s_k // config.keys_n):
            together = near(each * s_q, sizes, key.itemsize)
            _keys[(programs * ways,)](
                q, key, value, d, statistics, dk, dv, mask, cu_seqlens_q, cu_seqlens_k,
                *q_s, *k_s, *v_s, *d_s, *dk_s, *dv_s, *mask_strides,
                padded, tiles, batch * heads_k * ways, together, heads_k * ways, *numbers, **constants, EACH=each,
                CUTS=cuts, M=config.keys_m, N=config.keys_n, TMA=tma, STAGES=config.keys_stages,
                num_warps=config.keys_warps, num_stages=config.keys_stages,
            )  # fmt: skip
    except TOO_LARGE as error:
        of = _key(query.dtype, (width, v_width)), (loose, mask_bytes), query.device
        refuse(BACKWARD, *of, asked, error, room, last=given is not None)
        return backward(
            dout, query, key, value, out, lse, spec=spec, layout=layout, attn_mask=attn_mask,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        )  # fmt: skip
    if ways > 1:
        add_up(dk, dv, dkey, dvalue, layout=layout)
    return dquery, dkey, dvalue
