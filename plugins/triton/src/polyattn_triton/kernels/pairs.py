"""Rows of an 8-bit cache, two numbers at a time: what decoding, which waits for nothing but memory, makes of them.

A tile is loaded as int16 [N, D/2] and gives two tiles, the numbers at even and at odd places of a row. Queries are
split the same way, so nothing is interleaved before the output is. It is what tensor cores' loads from shared memory
take: a value tile is turned there, and for single bytes no instruction does that.
"""

from __future__ import annotations

import functools

import torch

from polyattn_triton import runtime  # before Triton: it decides how that is imported
from polyattn_triton.kernels.rounding import native_fp8

import triton  # isort: skip
import triton.language as tl  # isort: skip

__all__ = ["IN_PAIRS", "as_pairs", "native", "nvidia", "pairs"]

INTERPRETED = runtime.INTERPRETED
IN_PAIRS = ("fp8_e4m3", "fp8_e5m2", "int8")

# Of two keys: each brings two numbers, and leaves the even one in one register, the odd one in the other.
_FROM_E4M3 = tl.constexpr(
    """{
    .reg .b16 a, b;
    .reg .b32 x, y;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 x, a;
    cvt.rn.f16x2.e4m3x2 y, b;
    prmt.b32 $0, x, y, 0x5410;
    prmt.b32 $1, x, y, 0x7632;
    }"""
)
# The byte 0x64 above n + 128 is the float16 1152 + n.
_FROM_INT8 = tl.constexpr(
    """{
    .reg .b32 x, y, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 x, $2, 0x80808080;
    prmt.b32 y, x, bias, 0x7351;
    prmt.b32 x, x, bias, 0x7250;
    sub.f16x2 $0, x, bias;
    sub.f16x2 $1, y, bias;
    }"""
)
# The upper byte of a float16.
_FROM_E5M2 = tl.constexpr(
    """{
    .reg .b32 x;
    prmt.b32 x, $2, 0, 0x2404;
    prmt.b32 $1, $2, 0, 0x3414;
    mov.b32 $0, x;
    }"""
)


def as_pairs(cache: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """An 8-bit cache [..., D] as int16 [..., D / 2]; others as they are."""
    return cache.view(torch.int16) if kv_dtype in IN_PAIRS else cache


@functools.cache
def nvidia(device: torch.device) -> bool:
    """Whether kernels may have NVIDIA's instructions in them."""
    return not runtime.INTERPRETED and device.type == "cuda" and not torch.version.hip


@functools.cache
def native(device: torch.device, kind: str) -> bool:
    """Whether `pairs` may use NVIDIA's instructions for a cache of `kind`: e4m3 is converted from Ada on."""
    return native_fp8(device) if kind == "fp8_e4m3" else kind in IN_PAIRS and nvidia(device)


@triton.jit
def pairs(raw, KIND: tl.constexpr, NATIVE: tl.constexpr, dtype: tl.constexpr):
    """The numbers at even and at odd places, before their scale, in float16 or float32. Exact.

    Args:
        raw: int16, as `as_pairs` gives them. NATIVE: by instructions of NVIDIA's, of two keys at a time (`native`).
    """
    if NATIVE:
        CODE: tl.constexpr = _FROM_INT8 if KIND == "int8" else _FROM_E5M2 if KIND == "fp8_e5m2" else _FROM_E4M3
        low, high = tl.inline_asm_elementwise(
            CODE, "=r,=r,r", [raw], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        return low.to(dtype), high.to(dtype)
    elif KIND == "int8":
        # A conversion from integers takes four times as long: 0x6400 + n is the float16 1024 + n.
        bits = raw.to(tl.uint16, bitcast=True)
        low, high = (bits & 0xFF) ^ 0x6480, (bits >> 8) ^ 0x6480
        low, high = low.to(tl.float16, bitcast=True) - 1152.0, high.to(tl.float16, bitcast=True) - 1152.0
        return low.to(dtype), high.to(dtype)
    elif KIND == "fp8_e5m2":
        # The upper byte of a float16.
        bits = raw.to(tl.uint16, bitcast=True)
        low, high = bits << 8, bits & 0xFF00
        return low.to(tl.float16, bitcast=True).to(dtype), high.to(tl.float16, bitcast=True).to(dtype)
    else:
        # Sign, exponent and mantissa moved to where float16 has them, whose exponents are 8 lower.
        bits = raw.to(tl.uint16, bitcast=True)
        low = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        high = (bits & 0x8000) | ((bits & 0x7F00) >> 1)
        low, high = low.to(tl.float16, bitcast=True) * 256.0, high.to(tl.float16, bitcast=True) * 256.0
        return low.to(dtype), high.to(dtype)
