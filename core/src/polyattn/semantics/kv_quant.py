"""Rows of a quantised KV cache: from real values to what is stored, and back (S9).

A stored number times its scale is the real value. What is stored, by `AttentionRequest.kv_dtype`:

- fp8_e4m3, fp8_e5m2, int8: one number each; the scale is one number, one per head, or one per token and head;
- fp4_e2m1: uint8, two numbers in a byte, the first in the low four bits (as torch's float4_e2m1fn_x2). One scale for
  each 16 numbers of a row, e4m3 or float32. A second scale for the whole tensor is the caller's to fold: that of the
  keys into the softmax scale, that of the values into the output;
- latent rows (mla) in fp8_e4m3: uint8, 656 bytes a row; `mla_pack_fp8` makes them, `reference.mla_unpack_fp8` reads
  them.

Nothing here waits for a device or copies from the host, so all of it can be recorded into a device graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FP4_BLOCK", "MLA_BYTES", "MLA_WIDTHS", "fp4_scales", "mla_pack_fp8", "real", "stored"]

FP4_BLOCK = 16
"""Numbers of a row that share a scale."""
MLA_BYTES = 656
"""Of a latent row in FP8: 512 e4m3 numbers, the 4 float32 scales of their groups of 128, 64 bfloat16 rope numbers."""
MLA_WIDTHS = (576, 512)
"""(D_c + D_r, D_c) of such a row."""

_FP4_MAX, _FP8_MAX = 6.0, 448.0
# Between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6; a tie goes to the even code.
_TIES_DOWN, _TIES_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


def real(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Real values of stored rows.

    Args:
        rows: [..., D], or uint8 [..., D/2] for fp4_e2m1.
        scale: broadcastable to [..., D]; for fp4_e2m1 [..., D/16]; None = 1.
        dtype: of the result; the product is made in float32, or in `dtype` if that is wider.

    Returns:
        [..., D].
    """
    compute = torch.promote_types(dtype, torch.float32)
    if rows.dtype == torch.uint8:
        rows, scale = _from_fp4(rows), None if scale is None else _per_number(scale)
    return rows.to(dtype) if scale is None else (rows.to(compute) * scale.to(compute)).to(dtype)


def stored(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Real values as a cache stores them: divided by the scale, rounded to the nearest number (ties to even) and
    limited to the largest one. As the reference does it.

    Args:
        values: [..., D]. scale: as `real`, with at least one axis. dtype: of the cache, uint8 for fp4_e2m1.

    Returns:
        [..., D], or uint8 [..., D/2].
    """
    if scale is not None:
        values = values / (_per_number(scale) if dtype == torch.uint8 else scale)
    if dtype == torch.uint8:
        return _to_fp4(values)
    if dtype.itemsize == 1:
        # Not every cast saturates: the largest value must not become NaN, infinity or its opposite.
        floating = dtype.is_floating_point
        limits = torch.finfo(dtype) if floating else torch.iinfo(dtype)
        values = (values if floating else values.round()).clamp(limits.min, limits.max)
    return values.to(dtype)


def _per_number(scale: Tensor) -> Tensor:
    return scale.float().repeat_interleave(FP4_BLOCK, -1)


def _to_fp4(values: Tensor) -> Tensor:
    size = values.abs()
    code = torch.signbit(values).to(torch.uint8) << 3
    for bound in _TIES_DOWN:
        code += size > bound
    for bound in _TIES_UP:
        code += size >= bound
    low, high = torch.unflatten(code, -1, (-1, 2)).unbind(-1)
    return low | high << 4


def _from_fp4(rows: Tensor) -> Tensor:
    """float32 [..., D]. A code is sign, two bits of exponent, one of mantissa."""
    code = torch.stack([rows & 15, rows >> 4], -1).flatten(-2)
    exponent, mantissa = code >> 1 & 3, code & 1
    doubled = torch.where(exponent > 0, mantissa + 2 << exponent.clamp(min=1) - 1, mantissa)
    return torch.where(code > 7, -0.5, 0.5) * doubled


def fp4_scales(values: Tensor) -> Tensor:
    """The usual scales [..., D/16] for rows [..., D]: what makes the largest number of each 16 the largest of e2m1.
    e4m3, at least its smallest number above zero."""
    largest = torch.unflatten(values.float(), -1, (-1, FP4_BLOCK)).abs().amax(-1)
    return (largest / _FP4_MAX).clamp(2.0**-9, _FP8_MAX).to(torch.float8_e4m3fn)


def mla_pack_fp8(rows: Tensor) -> Tensor:
    """Latent rows [..., 576] as uint8 [..., 656]: latents over the largest of their 128, rope numbers in bfloat16."""
    latent, rope = torch.split(rows.float(), [MLA_WIDTHS[1], MLA_WIDTHS[0] - MLA_WIDTHS[1]], -1)
    groups = torch.unflatten(latent, -1, (4, 128))
    scale = (groups.abs().amax(-1, keepdim=True) / _FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = stored(groups, scale, torch.float8_e4m3fn).flatten(-2)
    parts = (numbers, scale.squeeze(-1), rope.to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
