"""Rows of a quantised KV cache: from real values to what is stored, and back (S9).

A stored number times its scale is the real value. What is stored, by `AttentionRequest.kv_dtype`:

- fp8_e4m3, fp8_e5m2, int8: one number each; the scale is one number, one per head, or one per token and head;
- fp4_e2m1: uint8, two numbers in a byte, the first in the low four bits (as torch's float4_e2m1fn_x2). One scale for
  each 16 numbers of a row, e4m3 or float32. A second scale for the whole tensor is the caller's to fold: that of the
  keys into the softmax scale, that of the values into the output;
- latent rows (mla): one of `LATENT_FORMATS`; `mla_pack` makes them, `mla_unpack` reads them.

Nothing here waits for a device or copies from the host, so all of it can be recorded into a device graph.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__ = [
    *(
        "FP4_BLOCK",
        "LATENT_FORMATS",
        "MLA_BYTES",
        "MLA_WIDTHS",
        "LatentFormat",
        "fp4_scales",
        "latent_format",
        "mla_pack",
    ),
    *("mla_pack_fp8", "mla_unpack", "real", "stored"),
]

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
    limited to the largest one. As the reference does it. FP8 keeps NaN; int8 and FP4 have none and store a finite
    number (FP4 a zero). The scales of `fp4_scales` are NaN then, so that all their 16 numbers are.

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


@dataclasses.dataclass(frozen=True)
class LatentFormat:
    """How a cache keeps latent rows in fewer bits than the queries.

    Attributes:
        kv_dtype, kv_scales: the words of a request. dtype: of the cache tensor.
        widths: (D_c + D_r, D_c) that it is defined for, None = any. multiple_of: of D_c + D_r.
        error: relative L2 error of rows of normal numbers, at most.
    """

    kv_dtype: str
    kv_scales: str
    dtype: torch.dtype
    error: float
    widths: tuple[int, int] | None = None
    multiple_of: int = 1

    def entries(self, width: int) -> int:
        """Entries of the last axis of the cache, for rows of `width` numbers."""
        if self.kv_dtype == "fp4_e2m1":
            return width // 2 + width // FP4_BLOCK
        return MLA_BYTES if self.kv_scales else width

    def takes(self, dims: tuple[int, int]) -> bool:
        """Whether rows of (D_c + D_r, D_c) can be kept so."""
        return (self.widths is None or dims == self.widths) and dims[0] % self.multiple_of == 0


LATENT_FORMATS = (
    LatentFormat("fp8_e4m3", "block128", torch.uint8, 0.03, MLA_WIDTHS),
    LatentFormat("fp8_e4m3", "", torch.float8_e4m3fn, 0.03),
    LatentFormat("fp8_e5m2", "", torch.float8_e5m2, 0.06),
    LatentFormat("fp4_e2m1", "block16", torch.uint8, 0.12, multiple_of=FP4_BLOCK),
)
"""Of latent rows, the usual of a dtype first. Without scales a number is stored as it is, which is one scale of 1; FP4
has the numbers of a row, two a byte, and then its scales, e4m3."""


def latent_format(cache: Tensor, width: int) -> LatentFormat | None:
    """The format of a cache of latent rows of `width` numbers, None = it has none of `LATENT_FORMATS`."""
    dtype, entries = cache.dtype, cache.shape[-1]
    return next((f for f in LATENT_FORMATS if f.dtype == dtype and f.entries(width) == entries), None)


def mla_pack(rows: Tensor, kv_dtype: str, kv_scales: str) -> Tensor:
    """Latent rows [..., D] as a cache of a format keeps them, [..., `LatentFormat.entries`]."""
    if kv_scales == "block128":
        return mla_pack_fp8(rows)
    if kv_scales == "block16":
        scale = fp4_scales(rows)
        return torch.cat([stored(rows.float(), scale, torch.uint8), scale.view(torch.uint8)], -1)
    dtype = next(f.dtype for f in LATENT_FORMATS if (f.kv_dtype, f.kv_scales) == (kv_dtype, kv_scales))
    return stored(rows, None, dtype)


def mla_unpack(cache: Tensor) -> Tensor:
    """The numbers of latent rows [..., D] that are in a format, float32; of others, as they are."""
    if cache.dtype == torch.uint8 and cache.shape[-1] != MLA_BYTES:
        width = cache.shape[-1] * 16 // 9
        scale = cache[..., width // 2 :].contiguous().view(torch.float8_e4m3fn)
        return real(cache[..., : width // 2], scale, torch.float32)
    if cache.dtype == torch.uint8:
        latent, scales, rope = torch.split(cache, [MLA_WIDTHS[1], 16, 128], dim=-1)
        latent = torch.unflatten(latent.contiguous().view(torch.float8_e4m3fn).float(), -1, (4, 128))
        scales = scales.contiguous().view(torch.float32).unsqueeze(-1)
        return torch.cat([(latent * scales).flatten(-2), rope.contiguous().view(torch.bfloat16).float()], dim=-1)
    return cache.float() if cache.dtype.itemsize == 1 else cache


def mla_pack_fp8(rows: Tensor) -> Tensor:
    """Latent rows [..., 576] as uint8 [..., 656]: latents over the largest of their 128, rope numbers in bfloat16."""
    latent, rope = torch.split(rows.float(), [MLA_WIDTHS[1], MLA_WIDTHS[0] - MLA_WIDTHS[1]], -1)
    groups = torch.unflatten(latent, -1, (4, 128))
    scale = (groups.abs().amax(-1, keepdim=True) / _FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = stored(groups, scale, torch.float8_e4m3fn).flatten(-2)
    parts = (numbers, scale.squeeze(-1), rope.to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
