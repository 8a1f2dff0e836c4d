"""MATE's `sageattention`: wrappers/SageAttention/sageattention/interface.py and the quantisers it calls,
mate/testing/sage_attention_quantization.py, in eager form; the kernel's own steps are csrc/sage_attention_asm.mu's.

Q is INT8 by 128 tokens, K (centred) by 16 of every 128 (two half blocks of 8 groups of 8), V FP8 by channel, and so
are the weights. `pv_accum_dtype` and unknown keywords are ignored. The output is bfloat16 inside, then of the query's
dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import OTHER, Library

from . import SIGNATURES

__all__ = ["library"]

MODULE = "sageattention.interface"
RECIPE = (128, 16, -1, 1)


def library(version: str = "0.2.2") -> Library:
    lib = Library("sageattention", version, MODULE, signatures=SIGNATURES)

    @lib.function(MODULE, "sageattention.sageattn_qk_int8_pv_fp8_cuda_sm90")
    def sageattn_qk_int8_pv_fp8_cuda_sm90(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensor_layout: str,
        is_causal: bool,
        qk_quant_dtype: str,
        sm_scale: float | None,
        smooth_k: bool,
        return_lse: bool,
        fp8_output: bool,
        quant_recipe: tuple[int, ...] | None,
        **_: Any,
    ) -> Tensor:
        if tensor_layout not in {"HND", "NHD"}:
            raise ValueError(f"Unsupported tensor_layout: {tensor_layout}. Expected 'HND' or 'NHD'.")
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError("q, k, and v must have dtype torch.float16 or torch.bfloat16.")
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError("q, k, and v must have the same dtype.")
        if quant_recipe not in (None, RECIPE):
            raise NotImplementedError(f"not emulated: quant_recipe={quant_recipe}")
        assert qk_quant_dtype in ("int8", OTHER)
        assert not return_lse
        assert not fp8_output
        if max(q.shape[-1], v.shape[-1]) > 128:
            raise RuntimeError("headdim_qk must be <= 128")
        if tensor_layout == "HND":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if is_causal:
            assert q.shape[1] == k.shape[1], "not documented: where the mask starts"
        dtype, scale = q.dtype, q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
        q, k, v = (t.bfloat16().transpose(1, 2) for t in (q, k, v))
        k = k - k.mean(2, keepdim=True) if smooth_k else k
        group = q.shape[1] // k.shape[1]
        keys = by_sixteen(k).repeat_interleave(group, 1)
        s = (by_rows(q, 128) @ keys.transpose(2, 3)) * scale
        if is_causal:
            s = s.masked_fill(torch.ones(s.shape[2:]).triu(1).bool(), -torch.inf)
        p = (s - s.amax(-1, keepdim=True)).exp()
        rounded = (p * 448).to(torch.float8_e4m3fn).float() / 448
        values = fp8(v, (2,)).repeat_interleave(group, 1)
        out = (rounded @ values / p.sum(-1, keepdim=True)).bfloat16().to(dtype)
        return out if tensor_layout == "HND" else out.transpose(1, 2)

    return lib


def int8(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Rounded to INT8 with one scale along `axes`, and back. Their conversion truncates."""
    scale = 127.0 / x.float().abs().amax(axes, keepdim=True).clamp(min=1e-12)
    return (x.float() * scale).clamp(-128, 127).to(torch.int8).float() / scale


def fp8(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    scale = 448.0 / x.float().abs().amax(axes, keepdim=True).clamp(min=1e-12)
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale


def filled(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x, [0, 0, 0, -x.shape[2] % block])


def by_rows(x: Tensor, block: int) -> Tensor:
    size = x.shape[2]
    return int8(filled(x, block).unflatten(2, (-1, block)), (3, 4)).flatten(2, 3)[:, :, :size]


def by_sixteen(x: Tensor) -> Tensor:
    """Of 128 tokens seen as [2, 8, 8], one scale for each index of the middle axis."""
    size = x.shape[2]
    blocks = filled(x, 128).unflatten(2, (-1, 2, 8, 8))
    return int8(blocks, (3, 5, 6)).flatten(2, 5)[:, :, :size]
