"""Rows of a KV cache as numbers in registers: what `polyattn.semantics.kv_quant.real` makes of them.

A tile of rows is loaded as the cache stores it (`as_stored` gives its tensor the dtype that kernels load) and turned
into a dtype that tensor cores multiply. Nothing is lost on that way: every number of these formats is one of bfloat16
and of float16. Scales by tensor, head or token stay outside the tile: those of keys belong to the logits, those of
values to the weights or the output. Only FP4 has them inside a row.
"""

from __future__ import annotations

from polyattn_triton import runtime  # first: it decides how Triton is imported

import torch  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip

from polyattn_triton.kernels.rounding import cast, e2m1_codes, e4m3_value, fp8_codes, int8_codes, native_fp8

__all__ = [
    "INTERPRETED",
    "LATENT_GROUP",
    "as_stored",
    "block_scales",
    "fp4_numbers",
    "least",
    "numbers",
    "restored",
    "scaled_parts",
    "scales_at",
    "spread",
]

INTERPRETED = runtime.INTERPRETED
LATENT_GROUP = 128
"""Numbers of an FP8 latent row that share a scale."""


def as_stored(cache: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """A cache, or FP8 scales, as kernels load it: FP8 as bytes, unless it is e4m3 and the hardware converts it."""
    if kv_dtype == "fp8_e5m2" or (kv_dtype == "fp8_e4m3" and not native_fp8(cache.device)):
        return cache.view(torch.uint8)
    return cache


def scaled_parts(cache: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The numbers (bytes), scales (float32) and rope numbers (bfloat16) of latent rows with FP8 numbers and a scale for
    each `LATENT_GROUP` of them.

    Args:
        cache: uint8, with `width` numbers at the beginning of a row.
    """
    end = width + 4 * (width // LATENT_GROUP)
    return cache[..., :width], cache[..., width:end].view(torch.float32), cache[..., end:].view(torch.bfloat16)


def least(bits: int) -> int:
    """The smallest width, and the fewest keys, of a tile of numbers of so many bits that tensor cores multiply.

    The compiler lays out operands so that a thread holds 32 bits of what was loaded: 4 numbers of 8 bits, 8 of 4 bits,
    side by side. Eight times that many are what an instruction of `mma.sync` sums up; of fewer, Triton 3.6 multiplies
    some twice and others not at all.
    """
    return max(8 * 32 // bits, 16)


@triton.jit
def numbers(raw, KIND: tl.constexpr, dtype: tl.constexpr):
    """Stored numbers [N, D] of a cache of `KIND` (a kv_dtype other than fp4_e2m1) in `dtype`, before their scale."""
    if KIND == "fp8_e4m3":
        if raw.dtype == tl.uint8:
            return tl.where(raw & 0x7F == 0x7F, float("nan"), e4m3_value(raw)).to(dtype)
        else:
            return raw.to(tl.float16).to(dtype)
    elif KIND == "fp8_e5m2":
        # The upper byte of a float16.
        return (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif KIND == "int8":
        # A conversion from integers takes four times as long: 2^23 + 128 + x is a float32 whose last byte is x + 128.
        bits = (raw.to(tl.int32) + 128) | 0x4B000000
        return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(dtype)
    else:
        return cast(raw, dtype)


@triton.jit
def _e2m1_value(code):
    """float32 values of e2m1 codes 0 to 15, int32."""
    # The exponent, put where float32 has its own, is 126 too low.
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def block_scales(raw):
    """float32 scales of FP4 rows, stored as float32 or as e4m3."""
    if raw.dtype == tl.uint8:
        return e4m3_value(raw)
    else:
        return raw.to(tl.float32)


@triton.jit
def scales_at(k_scale, v_scale, head, ks_head, vs_head, SCALES: tl.constexpr):
    """(scales of keys, of values, number for all logits, number for the output), of one head. Scales by token or block
    stay pointers; those by tensor or head become numbers."""
    if SCALES == "token" or SCALES == "block16":
        return k_scale + head.to(tl.int64) * ks_head, v_scale + head.to(tl.int64) * vs_head, 1.0, 1.0
    elif SCALES != "":
        k_number = tl.load(k_scale + head * ks_head).to(tl.float32)
        v_number = tl.load(v_scale + head * vs_head).to(tl.float32)
        return k_number, v_number, k_number, v_number
    else:
        return 1.0, 1.0, 1.0, 1.0


@triton.jit
def spread(scales, N: tl.constexpr, D: tl.constexpr):
    """Scales [N, D / 16] for each number [N, D]."""
    return tl.broadcast_to(scales[:, :, None], (N, D // 16, 16)).reshape(N, D)


@triton.jit
def fp4_numbers(raw, scales, N: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr):
    """Real values [N, D] of FP4 rows, bytes [N, D / 2], with their scales, float32 [N, D / 16]."""
    pair = raw.to(tl.int32)
    code = tl.join(pair & 15, pair >> 4).reshape(N, D)
    return cast(_e2m1_value(code) * spread(scales, N, D), dtype)


@triton.jit
def restored(x, KIND: tl.constexpr, stored_dtype: tl.constexpr, dtype: tl.constexpr):
    """What a cache of `KIND` would hold of new numbers `x`, real values over their scale, in `dtype`.

    `stored_dtype`: of a cache of kind auto. With fp4_e2m1 the scale is still to come, so ask for float32.
    """
    if KIND == "fp8_e4m3":
        return numbers(fp8_codes(x.to(tl.float32), False, False), KIND, dtype)
    elif KIND == "fp8_e5m2":
        return numbers(fp8_codes(x.to(tl.float32), True, False), KIND, dtype)
    elif KIND == "int8":
        return numbers(int8_codes(x.to(tl.float32)), KIND, dtype)
    elif KIND == "fp4_e2m1":
        return cast(_e2m1_value(e2m1_codes(x.to(tl.float32))), dtype)
    else:
        return cast(cast(x, stored_dtype), dtype)
