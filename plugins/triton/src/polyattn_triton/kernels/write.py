"""New tokens into a paged KV cache in one launch: rotated where that is asked, quantised as the cache stores (S9).

What is stored is bit for bit what core stores: by `polyattn.semantics.paged_kv.Pool.write` with the scales that are
there, by `polyattn.serving.KVPool.write` where scales are made from the rows (`make_scales`).

Floor: every new number is read once and its code written once. 8192 tokens of 8 KV heads of 128 in bfloat16 are 34 MB
read and as many written, 17 MB in FP8, 9.4 MB in FP4 with scales.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.contract import InvalidInputError, PagedTables, UnsupportedRequestError
from polyattn.semantics.kv_quant import FP4_BLOCK, MLA_BYTES, MLA_WIDTHS, latent_format
from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from .launching import Repeated, repeated
from .rounding import cast, e2m1_codes, e4m3_value, fp8_codes, int8_codes, native_fp8

__all__ = ["Launched", "Writer", "latent_parts", "write_kv", "write_latent"]

_TINY = tl.constexpr(1.1754943508222875e-38)
_KINDS = {"auto": "copy", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "int8": "int8", "fp4_e2m1": "e2m1"}
_ELEMENTS = 2048
"""Numbers of a program: with 4 warps two loads of 16 bytes by each thread for bfloat16."""
_KEPT = 64
"""Launches of a `Writer`."""


@triton.jit
def _divided(x, DIVISOR: tl.constexpr, DIVIDE: tl.constexpr):
    """`x / DIVISOR` as torch has it: a device multiplies by the inverse of a host number."""
    if DIVIDE:
        return tl.div_rn(x, tl.full(x.shape, DIVISOR, tl.float32))
    else:
        INVERSE: tl.constexpr = 1.0 / DIVISOR
        return x * INVERSE


@triton.jit
def _largest(x, AXIS: tl.constexpr):
    """The largest magnitude of float32 numbers, NaN if one is NaN: their bits are in that order, and a maximum of
    floats would leave NaN out."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS).to(tl.float32, bitcast=True)


@triton.jit
def _codes(x, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """float32 numbers as codes of 8 bits."""
    if KIND == "int8":
        return int8_codes(x)
    else:
        return fp8_codes(x, KIND == "e5m2", NATIVE)


@triton.jit
def _whose(token, seq_lens, cu_seqlens, sequences, highest, SEARCH: tl.constexpr):
    """The sequence of each packed token, and its place among the keys: below 0 in a row without keys."""
    if SEARCH:
        # How many sequences end at or before the token, from the highest bit of that number down.
        sequence, step = token * 0, highest
        while step > 0:
            end = tl.load(cu_seqlens + sequence + step, mask=sequence + step <= sequences, other=2147483647)
            sequence = tl.where(end <= token, sequence + step, sequence)
            step = step // 2
        inside = sequence < sequences
        end = tl.load(cu_seqlens + sequence + 1, mask=inside, other=0)
    else:
        sequence, end = token, token + 1
        inside = sequence < sequences
    length = tl.load(seq_lens + sequence, mask=inside, other=-1)
    return sequence, length - (end - token)


@triton.jit
def _angles(d, position, real, cos, sin, angle_stride, START: tl.constexpr, ROTARY: tl.constexpr,
            INTERLEAVED: tl.constexpr):  # fmt: skip
    """Cosines and signed sines [M, BLOCK_D] float32 for numbers d [BLOCK_D], 1 and 0 where nothing is rotated, and the
    number that each is rotated with."""
    HALF: tl.constexpr = ROTARY // 2
    i = d - START
    inside = (i >= 0) & (i < ROTARY)
    if INTERLEAVED:
        angle, first, partner = i // 2, i % 2 == 0, START + (i ^ 1)
    else:
        angle, first = i % HALF, i < HALF
        partner = tl.where(first, d + HALF, d - HALF)
    there = real[:, None] & inside[None, :]
    at = position[:, None].to(tl.int64) * angle_stride + angle[None, :]
    c = tl.load(cos + at, mask=there, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=there, other=0.0).to(tl.float32)
    return c, tl.where(first[None, :], -s, s), partner, there


@triton.jit
def _rotated(source, rows, d, mask, position, real, cos, sin, angle_stride, START: tl.constexpr, ROTARY: tl.constexpr,
             INTERLEAVED: tl.constexpr):  # fmt: skip
    """Rows [M, BLOCK_D] that begin at source + rows, in their dtype, rotated by their positions if ROTARY is not 0."""
    x = tl.load(source + rows[:, None] + d[None, :], mask=mask, other=0.0)
    if ROTARY:
        c, s, partner, there = _angles(d, position, real, cos, sin, angle_stride, START, ROTARY, INTERLEAVED)
        y = tl.load(source + rows[:, None] + partner[None, :], mask=there, other=0.0)
        # What is not rotated stays as it is: -0 * 1 + 0 is 0.
        x = tl.where(there, cast(x.to(tl.float32) * c + y.to(tl.float32) * s, x.dtype), x)
    return x


@triton.jit
def _store(x, cache, scale, row, scale_row, head, d, mask, KIND: tl.constexpr, SCALES: tl.constexpr,
           MAKE: tl.constexpr, ROWS_TOO: tl.constexpr, DIVIDE: tl.constexpr, NATIVE: tl.constexpr, D: tl.constexpr,
           BLOCK_D: tl.constexpr, M: tl.constexpr, real):  # fmt: skip
    """Store rows x [M, BLOCK_D] where `row` [M] says, with scales at `scale_row` [M]."""
    if KIND == "copy":
        tl.store(cache + row[:, None] + d[None, :], cast(x, cache.dtype.element_ty), mask=mask)
    elif KIND == "e2m1":
        BLOCKS: tl.constexpr = BLOCK_D // 16
        blocks = tl.reshape(x.to(tl.float32), [M, BLOCKS, 16])
        b = tl.arange(0, BLOCKS)
        at = scale + scale_row[:, None] + b[None, :]
        some = real[:, None] & (b < D // 16)[None, :]
        if MAKE:
            made = _divided(_largest(blocks, 2), 6.0, DIVIDE)
            made = tl.where(made < 0.001953125, 0.001953125, tl.where(made > 448.0, 448.0, made))
            code = fp8_codes(made, False, NATIVE)
            tl.store(at.to(tl.pointer_type(tl.uint8), bitcast=True), code, mask=some)
            by = tl.where(made == made, e4m3_value(code), made)
        elif scale.dtype.element_ty == tl.float32:
            by = tl.load(at, mask=some, other=1.0)
        else:
            by = e4m3_value(tl.load(at.to(tl.pointer_type(tl.uint8), bitcast=True), mask=some, other=56))
        if ROWS_TOO:
            by = tl.broadcast_to(by[:, :, None], [M, BLOCKS, 16])
            codes = tl.reshape(e2m1_codes(tl.div_rn(blocks, by)), [M, BLOCK_D // 2, 2])
            low, high = tl.split(codes)
            byte = tl.arange(0, BLOCK_D // 2)
            inside = real[:, None] & (byte < D // 2)[None, :]
            tl.store(cache + row[:, None] + byte[None, :], (low | (high << 4)).to(tl.uint8), mask=inside)
    else:
        numbers = x.to(tl.float32)
        if SCALES == "token":
            at = scale + scale_row
            if MAKE:
                LARGEST: tl.constexpr = 127.0 if KIND == "int8" else 57344.0 if KIND == "e5m2" else 448.0
                largest = _largest(numbers, 1)
                by = tl.maximum(_divided(largest, LARGEST, DIVIDE), _TINY)
                by = tl.where(largest > 0, by, 1.0)
                tl.store(at, by, mask=real)
            else:
                by = tl.load(at, mask=real, other=1.0)
            numbers = tl.div_rn(numbers, tl.broadcast_to(by[:, None], numbers.shape))
        elif SCALES == "head":
            by = tl.load(scale + head)
            numbers = tl.div_rn(numbers, tl.broadcast_to(by[:, None], numbers.shape))
        elif SCALES == "tensor":
            numbers = tl.div_rn(numbers, tl.broadcast_to(tl.load(scale), numbers.shape))
        if ROWS_TOO:
            TYPE: tl.constexpr = tl.int8 if KIND == "int8" else tl.uint8
            at = (cache + row[:, None] + d[None, :]).to(tl.pointer_type(TYPE), bitcast=True)
            tl.store(at, _codes(numbers, KIND, NATIVE), mask=mask)


@triton.jit
def _store_latent(x, cache, row, d, real, DIVIDE: tl.constexpr, NATIVE: tl.constexpr, M: tl.constexpr):
    """Latents x [M, 512] of rows of 656 bytes: codes, and the scales of their groups of 128."""
    groups = tl.reshape(x.to(tl.float32), [M, 4, 128])
    by = _divided(_largest(groups, 2), 448.0, DIVIDE)
    by = tl.where(by < _TINY, _TINY, by)
    codes = _codes(tl.div_rn(groups, tl.broadcast_to(by[:, :, None], [M, 4, 128])), "e4m3", NATIVE)
    tl.store(cache + row[:, None] + d[None, :], tl.reshape(codes, [M, 512]), mask=real[:, None])
    g = tl.arange(0, 4)
    at = (cache + row[:, None] + 512 + 4 * g[None, :]).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(at, by, mask=real[:, None])


# Numbers that differ from step to step compile no kernel of their own.
@triton.jit(
    do_not_specialize=["tokens", "sequences", "highest", "columns", "table_stride", "angle_stride"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "cu_seqlens", "slots", "positions"],
)
def _write(
    key, value, query, key_cache, value_cache, query_out, k_scale, v_scale, cos, sin,
    page_table, seq_lens, cu_seqlens, slots, positions, tokens, sequences, highest, columns, table_stride, angle_stride,
    key_t, key_h, value_t, value_h, query_t, query_h, out_t, out_h,
    kc_page, kc_place, kc_head, vc_page, vc_place, vc_head, ks_page, ks_place, ks_head, vs_page, vs_place, vs_head,
    H: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    M: tl.constexpr, PAGE: tl.constexpr, SEARCH: tl.constexpr, SIDES: tl.constexpr, KIND: tl.constexpr,
    SCALES: tl.constexpr, MAKE: tl.constexpr, ROWS_TOO: tl.constexpr, DIVIDE: tl.constexpr, NATIVE: tl.constexpr,
    START: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Grid [tiles of M rows, sides]; a row is a token and a head. Sides: keys, values if there are any, then query
    heads, H at a time."""
    r = tl.program_id(0) * M + tl.arange(0, M)
    token, head, side = r // H, r % H, tl.program_id(1)
    real = token < tokens
    position = token
    if slots is None:
        sequence, position = _whose(token, seq_lens, cu_seqlens, sequences, highest, SEARCH)
        real = real & (position >= 0)
        column = position // PAGE
        page = tl.load(page_table + sequence.to(tl.int64) * table_stride + column, mask=real & (column < columns),
                       other=0)  # fmt: skip
        place = position % PAGE
    else:
        slot = tl.load(slots + token, mask=real, other=0)
        page, place = slot // PAGE, slot % PAGE
    if positions is not None:
        position = tl.load(positions + token, mask=real, other=0)
    page = page.to(tl.int64)
    wide = token.to(tl.int64)
    if side == 0:
        row = page * kc_page + place * kc_place + head * kc_head
        if KIND == "latent":
            d = tl.arange(0, 512)
            source = wide * key_t
            mask = real[:, None] & (d < 512)[None, :]
            x = tl.load(key + source[:, None] + d[None, :], mask=mask, other=0.0)
            _store_latent(x, key_cache, row, d, real, DIVIDE, NATIVE, M)
            e = tl.arange(0, 64)
            mask = real[:, None] & (e < 64)[None, :]
            x = _rotated(key, source + 512, e, mask, position, real, cos, sin, angle_stride, 0, ROTARY, INTERLEAVED)
            at = (key_cache + row[:, None] + 528 + 2 * e[None, :]).to(tl.pointer_type(tl.bfloat16), bitcast=True)
            tl.store(at, cast(x.to(tl.float32), tl.bfloat16), mask=mask)
        else:
            d = tl.arange(0, BLOCK_D)
            mask = real[:, None] & (d < D)[None, :]
            x = _rotated(key, wide * key_t + head * key_h, d, mask, position, real, cos, sin, angle_stride, START,
                         ROTARY, INTERLEAVED)  # fmt: skip
            _store(x, key_cache, k_scale, row, page * ks_page + place * ks_place + head * ks_head, head, d, mask, KIND,
                   SCALES, MAKE, ROWS_TOO, DIVIDE, NATIVE, D, BLOCK_D, M, real)  # fmt: skip
    elif side < SIDES:
        if value is not None:
            d = tl.arange(0, BLOCK_V)
            mask = real[:, None] & (d < D_V)[None, :]
            x = tl.load(value + (wide * value_t + head * value_h)[:, None] + d[None, :], mask=mask, other=0.0)
            row = page * vc_page + place * vc_place + head * vc_head
            _store(x, value_cache, v_scale, row, page * vs_page + place * vs_place + head * vs_head, head, d, mask,
                   KIND, SCALES, MAKE, ROWS_TOO, DIVIDE, NATIVE, D_V, BLOCK_V, M, real)  # fmt: skip
    else:
        if query is not None:
            # Queries of rows without keys are nobody's, but they are numbers.
            real = token < tokens
            position = tl.maximum(position, 0)
            head += (side - SIDES) * H
            d = tl.arange(0, BLOCK_D)
            mask = real[:, None] & (d < D)[None, :]
            x = _rotated(query, wide * query_t + head * query_h, d, mask, position, real, cos, sin, angle_stride,
                         START, ROTARY, INTERLEAVED)  # fmt: skip
            tl.store(query_out + (wide * out_t + head * out_h)[:, None] + d[None, :], x, mask=mask)


def write_kv(
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    *,
    tables: PagedTables | None = None,
    slots: Tensor | None = None,
    page_size: int,
    hnd: bool = False,
    kv_dtype: str = "auto",
    kv_scales: str = "",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    make_scales: bool = False,
    rows: bool = True,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    positions: Tensor | None = None,
    query: Tensor | None = None,
    query_out: Tensor | None = None,
) -> Launched | None:
    """Store the keys and values of new tokens, the last of their sequences, in one launch.

    Args:
        key: [T, H_kv, D]; value: [T, H_kv, D_v]. Float, any strides but a dense last axis.
        key_cache, value_cache: [pages, page_size, H_kv, D | D_v], with `hnd` [pages, H_kv, page_size, D | D_v];
            fp4_e2m1: uint8, D/2 wide. Dense last axis.
        tables: `polyattn.contract.PagedTables`. Tokens of rows without keys are not written.
        slots: int64 [T], page * page_size + place, in place of the tables.
        kv_dtype: auto (numbers in the dtype of the cache), fp8_e4m3, fp8_e5m2, int8 or fp4_e2m1.
        kv_scales, k_scale, v_scale: tensor [1], head [H_kv], token [pages, page_size, H_kv] or block16 [..., D/16] in
            the cache's layout; float32, block16 e4m3 too. A stored number times its scale is the real value.
        make_scales: scales by token or block16 are made from the rows and stored; else they are read.
        rows: False with `make_scales` stores the scales alone.
        cos, sin: [positions, R/2], dense last axis; the first R numbers of a key are rotated, computed in float32 and
            rounded once: number i with i + R/2 (neox), with `interleaved` 2i with 2i + 1. positions: int [T]; without
            them a token's place among the keys, which `slots` do not tell.
        query: [T, H_q, D], rotated too, into query_out [T, H_q, D], which shares no memory with it.

    Returns:
        The launch, which a `Writer` repeats; None where there was nothing to write.

    Raises:
        InvalidInputError: tensors that do not fit together. UnsupportedRequestError: a dtype that is not written.
        BackendUnavailableError: CPU tensors where kernels are compiled.
    """
    runtime.check_device(key.device)
    kind = _KINDS.get(kv_dtype, "copy")
    if kind == "copy" and key_cache.dtype.itemsize == 1:
        raise UnsupportedRequestError(
            f"write_kv: kv_dtype={kv_dtype!r} says nothing of a cache in {key_cache.dtype}; say {', '.join(_KINDS)}"
        )
    if kind != "copy" and key.dtype == torch.float64:
        raise UnsupportedRequestError(f"write_kv: rows in float64 are not stored as {kv_dtype}; give float32 or less")
    D = key.shape[2]
    if make_scales and kv_scales not in ("token", "block16"):
        raise InvalidInputError(f"write_kv: make_scales with kv_scales={kv_scales!r}; token and block16 are made")
    if (value is None) != (value_cache is None) or (kv_scales != "") != (k_scale is not None):
        raise InvalidInputError("write_kv: values go with a value_cache, and kv_scales with k_scale and v_scale")
    if kind == "e2m1" and (
        kv_scales != "block16" or D % FP4_BLOCK or (value is not None and value.shape[2] % FP4_BLOCK)
    ):
        raise InvalidInputError(
            f"write_kv: fp4_e2m1 has scales by block16 and head dims that are multiples of 16; got {kv_scales!r}, {D}"
        )
    return _launch(
        key, value, key_cache, value_cache, tables, slots, page_size, hnd, kind, kv_scales, k_scale, v_scale,
        make_scales, rows, cos, sin, interleaved, positions, query, query_out, 0,
    )  # fmt: skip


def write_latent(
    rows: Tensor,
    cache: Tensor,
    *,
    tables: PagedTables | None = None,
    slots: Tensor | None = None,
    page_size: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    positions: Tensor | None = None,
) -> Launched | None:
    """Store the latent rows of new tokens, in one launch.

    Args:
        rows: [T, D_c + D_r]. cache: [pages, page_size, D_c + D_r], or rows in one of `kv_quant.LATENT_FORMATS`.
        cos, sin: [positions, R/2]: the last R numbers of a row are rotated. Others: as `write_kv`.

    Returns, raises:
        As `write_kv`.
    """
    runtime.check_device(rows.device)
    D, told = rows.shape[1], latent_format(cache, rows.shape[1])
    if cache.dtype == torch.uint8 and (told is None or not told.takes((D, MLA_WIDTHS[1]))):
        raise InvalidInputError(
            f"write_latent: FP8 rows hold {MLA_WIDTHS[0]} numbers in {MLA_BYTES} bytes, FP4 rows a multiple of "
            f"{FP4_BLOCK} in 9 bytes for each {FP4_BLOCK}; got {D} for {cache.shape[2]}"
        )
    if told is not None and rows.dtype == torch.float64:
        raise UnsupportedRequestError(
            f"write_latent: rows in float64 are not stored as {told.kv_dtype}; give float32 or less"
        )
    start = 0 if cos is None else D - 2 * cos.shape[1]
    kind = "copy" if told is None else "latent" if told.kv_scales == "block128" else _KINDS[told.kv_dtype]
    if kind == "latent" and cos is not None and start != MLA_WIDTHS[1]:
        raise InvalidInputError(f"write_latent: FP8 rows rotate {D - MLA_WIDTHS[1]} numbers, cos has {D - start}")
    numbers, factors = latent_parts(cache, "" if told is None else told.kv_scales)
    scales = "" if factors is None else "block16"
    return _launch(
        rows.unsqueeze(1), None, numbers.unsqueeze(2), None, tables, slots, page_size, False, kind, scales,
        None if factors is None else factors.unsqueeze(2), None, factors is not None, True, cos, sin, interleaved,
        positions, None, None, start,
    )  # fmt: skip


def latent_parts(cache: Tensor, kv_scales: str) -> tuple[Tensor, Tensor | None]:
    """A cache of latent rows as what a launch takes: of FP4 (block16) the numbers, and their scales, e4m3."""
    if kv_scales != "block16":
        return cache, None
    half = cache.shape[-1] * 8 // 9  # of each 9 bytes the last is a scale
    return cache[..., :half], cache[..., half:].view(torch.float8_e4m3fn)


def _plain(tensor: Tensor | None) -> Tensor | None:
    return tensor.view(torch.uint8) if tensor is not None and tensor.dtype == torch.float8_e4m3fn else tensor


@functools.cache
def _tile(D: int, D_v: int) -> tuple[int, int, int]:
    """(BLOCK_D, BLOCK_V, rows of a program)."""
    block, block_v = triton.next_power_of_2(D), triton.next_power_of_2(max(D_v, 1))
    return block, block_v, max(_ELEMENTS // max(block, block_v), 1)


def _launch(
    key: Tensor, value: Tensor | None, key_cache: Tensor, value_cache: Tensor | None, tables: PagedTables | None,
    slots: Tensor | None, page_size: int,
    hnd: bool, kind: str, scales: str, k_scale: Tensor | None, v_scale: Tensor | None, make: bool, rows: bool,
    cos: Tensor | None, sin: Tensor | None, interleaved: bool, positions: Tensor | None, query: Tensor | None,
    query_out: Tensor | None, start: int,
) -> Launched | None:  # fmt: skip
    T, H, D = key.shape
    if not T or not key_cache.shape[0]:
        return None
    if slots is None and tables is None:
        raise InvalidInputError("write: where the tokens go is said by slots, or by tables")
    page_table, seq_lens, cu_seqlens_q, max_seqlen_q = (None, None, None, 0) if tables is None else tables[:4]
    if cos is not None and slots is not None and positions is None:
        raise InvalidInputError("write: cos and sin need positions where slots are given; slots do not tell them")
    if (query is None) != (query_out is None) or (query is not None and cos is None):
        raise InvalidInputError("write: query is rotated into query_out, by cos and sin; give all of them")
    D_v = 0 if value is None else value.shape[2]
    block, block_v, m = _tile(D, D_v)
    if scales == "block16" and (key_cache.shape[-1] * 2, H) != (D, key_cache.shape[1 if hnd else 2]):
        raise InvalidInputError(
            f"write: rows {[H, D]} do not fit a cache {list(key_cache.shape)} of two numbers a byte"
        )
    native = native_fp8(key.device)
    if not native and kind in ("e4m3", "e2m1"):
        # Devices without the type take no pointers to it either.
        key_cache, value_cache, k_scale, v_scale = map(_plain, (key_cache, value_cache, k_scale, v_scale))
    head_axis, place_axis = (1, 2) if hnd else (2, 1)

    def strides(tensor: Tensor | None) -> tuple[int, int, int]:
        if tensor is None or tensor.ndim < 3:
            return 0, 0, 0
        found = tensor.stride()
        return found[0], found[place_axis], found[head_axis]

    N = 0 if seq_lens is None else seq_lens.shape[0]
    sides = 1 if value is None else 2
    more = 0 if query is None else query.shape[1] // H
    # In the order of `_write`; a Writer repeats what follows the tokens.
    arguments = (
        key, value, query, key_cache, value_cache, query_out, k_scale, v_scale, cos, sin,
        page_table, seq_lens, cu_seqlens_q, slots, positions, T, N, 1 << N.bit_length() >> 1,
        0 if page_table is None else page_table.shape[1], 0 if page_table is None else page_table.stride(0),
        0 if cos is None else cos.stride(0),
        *key.stride()[:2], *((0, 0) if value is None else value.stride()[:2]),
        *((0, 0) if query is None else query.stride()[:2]),
        *((0, 0) if query_out is None else query_out.stride()[:2]),
        *strides(key_cache), *strides(value_cache), *strides(k_scale), *strides(v_scale),
        H, D, D_v, block, block_v, m, page_size, not (max_seqlen_q == 1 and T == N), sides, kind, scales, make,
        rows, key.device.type == "cpu", native, start, 0 if cos is None else 2 * cos.shape[1], interleaved,
    )  # fmt: skip
    with runtime.device_of(key):
        # A product is rounded before it is added to, as torch does it.
        kernel = _write[(triton.cdiv(T * H, m), sides + more)](*arguments, num_warps=4, enable_fp_fusion=False)
    return Launched(kernel, H, m, sides, arguments[16:])


class Launched(NamedTuple):
    """A launch by slots, to be repeated.

    Attributes:
        kernel: as Triton returns it. heads: of a token. rows: of a program. sides: of the grid. rest: of the arguments,
            what follows the number of tokens.
    """

    kernel: Any
    heads: int
    rows: int
    sides: int
    rest: tuple[Any, ...]


class Writer:
    """Rows of one dtype into one cache, by slots: for calls of every layer of every step.

    What Triton compiles for is the strides of the rows, those of the cache, and whether all of it begins at a multiple
    of 16 bytes. Rows that lie as some did before are written by the same launch again, wherever they and the cache are
    now; others, and those that begin elsewhere, by a launch that Triton looks at.

    Args:
        write: (key, value, slots, rows) -> the launch. tensors: key_cache, value_cache, k_scale, v_scale of it.
    """

    __slots__ = ("_k_scale", "_key_cache", "_known", "_v_scale", "_value_cache", "_write")

    def __init__(
        self,
        write: Callable[[Tensor, Tensor | None, Tensor, bool], Launched | None],
        tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    ) -> None:
        self._write = write
        self._key_cache, self._value_cache, self._k_scale, self._v_scale = tensors
        self._known: dict[Any, tuple[Repeated, Launched]] = {}

    def __call__(self, slots: Tensor, key: Tensor, value: Tensor | None = None, *, rows: bool = True) -> None:
        """As `polyattn.contract.RowsWriter`."""
        lies = key.stride(), None if value is None else value.stride(), rows
        found = self._known.get(lies)
        if found is None:
            self._first(lies, slots, key, value, rows)
            return
        k, v, cache = key.data_ptr(), 0 if value is None else value.data_ptr(), self._key_cache.data_ptr()
        more = 0 if self._value_cache is None else self._value_cache.data_ptr()
        k_scale = 0 if self._k_scale is None else self._k_scale.data_ptr()
        v_scale = 0 if self._v_scale is None else self._v_scale.data_ptr()
        if (k | v | cache | more | k_scale | v_scale) & 15:
            self._first(None, slots, key, value, rows)
            return
        again, (_, heads, tile, sides, rest) = found
        tokens = key.shape[0]
        again(
            (-(-tokens * heads // tile), sides, 1),
            (k, v, 0, cache, more, 0, k_scale, v_scale, 0, 0, 0, 0, 0, slots.data_ptr(), 0, tokens, *rest),
        )

    def _first(self, lies: Any, slots: Tensor, key: Tensor, value: Tensor | None, rows: bool) -> None:
        """Rows as Triton has not seen them: kept if others of their strides may be written as they are."""
        own, own_value = _dense(key), None if value is None else _dense(value)
        done = self._write(own, own_value, slots, rows)
        tensors = (key, value, self._key_cache, self._value_cache, self._k_scale, self._v_scale)
        aligned = not any(t is not None and t.data_ptr() & 15 for t in tensors)
        if done is None or lies is None or not aligned or own is not key or own_value is not value:
            return
        again = repeated(done.kernel, key.device)
        if again is not None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[lies] = again, done


def _dense(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()
