"""`fa` on Intel GPUs: dense and packed batches by sgl-kernel for XPU and by vllm-xpu-kernels.

From their sources: fp16 and bf16, K and V of one width. Both take a softcap and ignore it. sgl-kernel's kernels write
no LSE and, without pages, take no sinks (src/sycl/flash_attention.cpp, xe_fmha_fwd_prefill_nopage_kernel.cpp.in).
vllm-xpu-kernels writes the LSE without pages, windows and sinks (csrc/xpu/attn/xe_2/fmha_xe2.cpp).
"""

from __future__ import annotations

from typing import Any

from polyattn.contract import Alias, AutoRule, BackendInfo, Fallback, Provider, Range, Window, conditions, row

from .common import CAUSAL, HALF, LENGTHS, SGL_ARCHS, SGL_KERNEL_XPU, SINKS, VLLM_ARCHS, VLLM_XPU_KERNELS, WIDTHS

__all__ = ["BACKENDS"]

DENSE: dict[str, Any] = {
    "family": ("dense", "varlen"),
    "dtype": HALF,
    "head_dim": WIDTHS,
    "s_relation": LENGTHS,
    "causal": CAUSAL,
    "group": Range(1, 16),
    "scale": True,
    "cross": True,
    "multimodal": True,
}

FA = BackendInfo(
    "fa",
    "xpu",
    (
        Provider(
            "fa3/sgl-kernel-xpu",
            (row(when={"arch": SGL_ARCHS}, **DENSE, window=Window()),),
            target="polyattn_xpu.sgl_kernel:FlashAttentionSglKernel",
            requires=(SGL_KERNEL_XPU,),
        ),
        Provider(
            "vllm-xpu-kernels",
            (
                row(when={"arch": VLLM_ARCHS}, **DENSE, window=Window()),
                row(when={"arch": VLLM_ARCHS}, **DENSE, lse=True, lowered=SINKS),
            ),
            target="polyattn_xpu.vllm_kernels:FlashAttentionVLLM",
            requires=(VLLM_XPU_KERNELS,),
        ),
    ),
    summary="Intel's FlashAttention on dense and packed batches",
    priority=60,
    aliases=(Alias("fa3", ("dense", "varlen"), provider="fa3"),),
    fallbacks=(Fallback("torch_sdpa", "FlashAttention is not installed or the call is outside its limits"),),
    auto=(AutoRule(300, "XPU: FlashAttention within its limits", conditions(family=("dense", "varlen"))),),
    evidence="emulator",
    upstream="https://github.com/sgl-project/sgl-kernel-xpu",
    note="no softcap: both libraries take one and ignore it; the LSE comes from vllm-xpu-kernels alone",
)

BACKENDS: tuple[BackendInfo, ...] = (FA,)
