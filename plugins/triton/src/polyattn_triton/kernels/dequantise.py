"""Pages of a quantised cache as numbers, in one launch for each cache: what `dequantise_kv` of core copies for kernels
that read no quantised cache.

The numbers are bit for bit those of `polyattn.semantics.kv_quant.real` and `mla_unpack`. What lies behind the last
token of a sequence is neither read nor written.

Floor: stored numbers are read once and written once in the queries' dtype. A million tokens of 8 KV heads of 128 in FP8
are 1.1 GB read and 2.1 GB written for keys, and as much for values: 2.1 ms at 3 TB/s.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest
from polyattn.semantics.kv_quant import MLA_WIDTHS
from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

from .cached import LATENT_GROUP, as_stored, fp4_numbers, numbers, scaled_parts
from .rounding import cast
from .write import latent_parts

__all__ = ["dequantised"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ELEMENTS = 8192
"""Numbers of a program, at most: with 4 warps four loads of 16 bytes by each thread for 8 bits. Half as many where the
rows are then of one page."""
_LATENTS = tl.constexpr(MLA_WIDTHS[1])
"""Numbers of a row of 656 bytes that are stored in 8 bits."""
_GROUP = tl.constexpr(LATENT_GROUP)
"""Of them share a scale."""


# Numbers that differ from step to step compile no kernel of their own.
@triton.jit(
    do_not_specialize=["columns", "tiles", "table_row"],
    do_not_specialize_on_alignment=["page_table", "seq_lens"],
)
def _dequantise(
    cache, scale, rope, page_table, seq_lens, out, columns, tiles, table_row, cache_page, scale_page, rope_page,
    PLACE: tl.constexpr, HEAD: tl.constexpr, SCALE_PLACE: tl.constexpr, SCALE_HEAD: tl.constexpr,
    ROPE_PLACE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    PAGE: tl.constexpr, HND: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, `tiles` of M rows of each, blocks of BLOCK numbers of a row; neighbours read the same rows.

    A row is of a token and a head. Rows are in the order in which they lie in a page."""
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    ROWS: tl.constexpr = PAGE * H
    dtype: tl.constexpr = out.dtype.element_ty
    block = tl.program_id(0) % BLOCKS
    tile = tl.program_id(0) // BLOCKS % tiles
    n = (tl.program_id(0) // BLOCKS // tiles).to(tl.int64)
    first = tile * M
    length = tl.minimum(tl.load(seq_lens + n), columns * PAGE)
    if first // ROWS * PAGE < length:
        r = first + tl.arange(0, M)
        column, inner = r // ROWS, r % ROWS
        if HND:
            place, head = inner % PAGE, inner // PAGE
        else:
            place, head = inner // H, inner % H
        real = column * PAGE + place < length
        table = page_table + n * table_row
        if ROWS % M == 0:
            page = tl.load(table + first // ROWS).to(tl.int64)
        else:
            page = tl.load(table + column, mask=real, other=0).to(tl.int64)
        d = block * BLOCK + tl.arange(0, BLOCK)
        if D % BLOCK == 0:
            mask = real[:, None]
        else:
            mask = real[:, None] & (d < D)[None, :]
        row = page * cache_page + (place * PLACE + head * HEAD)
        if KIND == "block128":
            if block * BLOCK < _LATENTS:
                raw = tl.load(cache + row[:, None] + d[None, :], mask=mask, other=0.0)
                by = tl.load(
                    scale + page * scale_page + (place * SCALE_PLACE + block * BLOCK // _GROUP), mask=real, other=0.0
                )
                x = cast(numbers(raw, "fp8_e4m3", tl.float32) * by[:, None], dtype)
            else:
                at = rope + (page * rope_page + place * ROPE_PLACE)[:, None] + (d - _LATENTS)[None, :]
                x = cast(tl.load(at, mask=mask, other=0.0), dtype)
        elif KIND == "fp4_e2m1":
            byte = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
            sixteen = block * (BLOCK // 16) + tl.arange(0, BLOCK // 16)
            if D % BLOCK == 0:
                bytes_mask, scales_mask = mask, mask
            else:
                bytes_mask = real[:, None] & (byte < D // 2)[None, :]
                scales_mask = real[:, None] & (sixteen < D // 16)[None, :]
            raw = tl.load(cache + row[:, None] + byte[None, :], mask=bytes_mask, other=0.0)
            at = scale + (page * scale_page + (place * SCALE_PLACE + head * SCALE_HEAD))[:, None] + sixteen[None, :]
            by = tl.load(at, mask=scales_mask, other=0.0)
            if scale.dtype.element_ty == tl.float32:
                x = fp4_numbers(raw, by, M, BLOCK, dtype)
            else:
                x = fp4_numbers(raw, numbers(by, "fp8_e4m3", tl.float32), M, BLOCK, dtype)
        else:
            raw = tl.load(cache + row[:, None] + d[None, :], mask=mask, other=0.0)
            if SCALES == "":
                x = numbers(raw, KIND, dtype)
            else:
                if SCALES == "tensor":
                    by = tl.load(scale).to(tl.float32)
                elif SCALES == "head":
                    by = tl.load(scale + head * SCALE_HEAD).to(tl.float32)[:, None]
                else:
                    at = scale + page * scale_page + (place * SCALE_PLACE + head * SCALE_HEAD)
                    by = tl.load(at, mask=real, other=0.0).to(tl.float32)[:, None]
                x = cast(numbers(raw, KIND, tl.float32) * by, dtype)
        to = (n * columns * ROWS + r) * D
        tl.store(out + to[:, None] + d[None, :], x, mask=mask)


@functools.cache
def _tile(width: int, page: int) -> tuple[int, int]:
    """(numbers of a block, rows of a tile) for rows of `width` numbers, of which a page has `page`."""
    block = min(max(triton.next_power_of_2(width), 16), 128)
    # Blocks without a rest: 576 is 9 of 64.
    block = 64 if width % 128 and width % 64 == 0 else block
    rows = _ELEMENTS // block
    return block, rows // 2 if page % rows and page % (rows // 2) == 0 else rows


def dequantised(
    request: AttentionRequest, cache: Tensor, scale: Tensor | None, page_table: Tensor, seq_lens: Tensor
) -> Tensor | None:
    """`polyattn.contract.DeviceOps.dequantised`, for results of at most 32 bits.

    Raises:
        BackendUnavailableError: CPU tensors where kernels are compiled.
    """
    dtype, latent, hnd = getattr(torch, request.dtype), cache.ndim == 3, request.kv_layout == "HND"
    kind, scales = request.kv_dtype if cache.dtype.itemsize == 1 else "auto", request.kv_scales
    width = request.head_dim if latent else cache.shape[3] * (2 if kind == "fp4_e2m1" else 1)
    if dtype not in _FLOATS or cache.dtype == torch.float64 or not _whole(cache, scale, scales):
        return None
    runtime.check_device(cache.device)
    rope = None
    if scales == "block128":
        _, scale, rope = scaled_parts(cache, MLA_WIDTHS[1])
        cache = cache.view(torch.float8_e4m3fn)
    elif latent and scales:
        cache, scale = latent_parts(cache, scales)
    cache = as_stored(cache, kind)
    scale = None if scale is None else as_stored(scale, "fp8_e4m3" if scale.dtype.itemsize == 1 else "auto")
    place_axis, head_axis = (2, 1) if hnd and not latent else (1, 2)
    page, heads = cache.shape[place_axis], 1 if latent else cache.shape[head_axis]
    sequences, columns = page_table.shape
    inside = cache.shape[1:2] if latent else cache.shape[1:3]
    out = cache.new_empty(sequences * columns, *inside, width, dtype=dtype)
    if not out.numel() or not cache.shape[0]:
        return out

    def strides(tensor: Tensor | None) -> tuple[int, int, int]:
        if tensor is None or tensor.ndim < 3:
            return 0, 0, 0 if tensor is None or not tensor.ndim else tensor.stride(0)
        return tensor.stride(0), tensor.stride(place_axis), 0 if latent else tensor.stride(head_axis)

    (cache_page, *own), (scale_page, *of_scale), (rope_page, rope_place, _) = map(strides, (cache, scale, rope))
    block, rows = _tile(width, page * heads)
    tiles = triton.cdiv(columns * page * heads, rows)
    with runtime.device_of(cache):
        _dequantise[(sequences * tiles * triton.cdiv(width, block),)](
            cache, scale, rope, page_table, seq_lens, out, columns, tiles, page_table.stride(0),
            cache_page, scale_page, rope_page, *own, *of_scale, rope_place,
            H=heads, D=width, BLOCK=block, M=rows, PAGE=page, HND=place_axis == 2,
            KIND=scales if scales == "block128" else kind, SCALES=scales, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _whole(cache: Tensor, scale: Tensor | None, scales: str) -> bool:
    """Whether what lies in the rows of a cache begins where numbers of its kind do, and scales are what is read."""
    if scales == "block128":
        return not (cache.stride(0) | cache.stride(1) | cache.storage_offset()) % 4
    if scale is None:
        return True
    return scale.stride(-1) == 1 or scale.shape[-1] == 1 if scales == "block16" else scale.dtype.itemsize > 1
