"""Numbers as a KV cache stores them, rounded in registers as `polyattn.semantics.kv_quant` does.

To nearest, ties to even.

Eight- and four-bit floats are made from bits, the same on every device and under the interpreter; where the hardware
converts to FP8 itself, `NATIVE` says so.
"""

from __future__ import annotations

import functools

import torch

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip
import triton.language as tl  # isort: skip

__all__ = ["cast", "e2m1_codes", "e4m3_value", "fp8_codes", "int8_codes", "native_fp8"]

INTERPRETED = tl.constexpr(runtime.INTERPRETED)


@functools.cache
def native_fp8(device: torch.device) -> bool:
    """Whether the compiler turns float32 into OCP's FP8 by an instruction of the device."""
    if runtime.INTERPRETED or device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """`x` in a floating dtype, to nearest even. Triton's interpreter would cut float32 off where bfloat16 ends."""
    if INTERPRETED and dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        half = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        return tl.where(x == x, half, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _minifloat(size, BIAS: tl.constexpr, MANTISSA: tl.constexpr):
    """Codes without sign, int32, of float32 numbers from 0 to the largest of a format with that bias and mantissa."""
    CUT: tl.constexpr = 23 - MANTISSA
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal number the step is 2^(1 - BIAS - MANTISSA): that of float32 after this addition.
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    MAGIC_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    small = (size + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    return tl.where(bits < ((128 - BIAS) << 23), small, normal)


@triton.jit
def fp8_codes(x, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """uint8 codes of float32 numbers in e4m3fn or e5m2; what is larger than the largest becomes that."""
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    size = tl.abs(x)
    if NATIVE:
        limited = tl.where(size > LARGEST, tl.where(x > 0, LARGEST, -LARGEST), x)
        if E5M2:
            return limited.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return limited.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = _minifloat(tl.minimum(size, LARGEST), 15 if E5M2 else 7, 2 if E5M2 else 3)
        code = tl.where(x == x, code, 0x7F)
        return (code | _sign(x, 24)).to(tl.uint8)


@triton.jit
def e2m1_codes(x):
    """int32 codes, 0 to 15, of float32 numbers in e2m1; not a number becomes 0."""
    code = tl.where(x == x, _minifloat(tl.minimum(tl.abs(x), 6.0), 1, 1), 0)
    return code | _sign(x, 28)


@triton.jit
def _sign(x, DOWN: tl.constexpr):
    """The sign bit of float32 numbers, moved down."""
    return (x.to(tl.int32, bitcast=True) >> DOWN) & (1 << (31 - DOWN))


@triton.jit
def int8_codes(x):
    """float32 numbers as int8."""
    limited = tl.minimum(tl.maximum(x, -128.0), 127.0)
    # Whole numbers are what float32 has left up there: the addition rounds.
    return ((limited + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def e4m3_value(code):
    """float32 values of e4m3fn codes, any integer dtype."""
    bits = code.to(tl.int32)
    # Sign and exponent are put where float32 has its own; the exponent is 120 too low there.
    return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
