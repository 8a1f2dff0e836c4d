"""`intel_xpu`: paged and latent caches on Intel GPUs by sgl-kernel for XPU, paged ones by vllm-xpu-kernels.

From their sources: pages of 64 or 128 (sgl-kernel), of 16, 32 or a multiple of 64 (vllm-xpu-kernels); FP8 caches with
one scale each; sinks in the queries' dtype, by sgl-kernel for D = 64 and 16-bit caches only; a softcap is taken and
ignored; no LSE over pages. The latent kernels are causal, of 512 + 64 wide rows, for 128 heads at most.
"""

from __future__ import annotations

from typing import Any

from polyattn.contract import AutoRule, BackendInfo, ConfigField, Provider, Range, Row, Window, conditions, row

from .common import (
    CAUSAL,
    DEQUANTISE,
    HALF,
    KV_DTYPES,
    LATENT_DTYPES,
    LENGTHS,
    PHASES,
    SGL_ARCHS,
    SGL_KERNEL_XPU,
    VLLM_ARCHS,
    VLLM_XPU_KERNELS,
    WIDTHS,
)

__all__ = ["BACKENDS"]

SERVING: dict[str, Any] = {
    "lowered": DEQUANTISE,
    "dtype": HALF,
    "phase": PHASES,
    "scale": True,
    "graph_capture": True,
    "deterministic": True,
    "spec_topk": Range(0, 1),
}
PAGED: dict[str, Any] = {
    **SERVING,
    "family": "paged",
    "head_dim": (*WIDTHS, 512),
    "group": Range(1, 16),
    "s_relation": LENGTHS,
    "causal": CAUSAL,
    "window": Window(),
    "kv_layout": ("", "NHD"),
    "save_kv_cache": True,
}
FP8 = ("fp8_e4m3", "fp8_e5m2")


def _paged(archs: tuple[str, ...], page_size: Any, sinks: dict[str, Any]) -> tuple[Row, ...]:
    """Rows of one library: 16-bit caches, those with sinks, and FP8 ones with a scale each."""
    plain = {**PAGED, "page_size": page_size, "kv_dtype": "auto"}
    sunk = {**plain, **sinks, "sinks": True, "note": "sinks in the dtype of the queries"}
    kept = [row(when={"arch": archs, "kv_dtype": KV_DTYPES}, **(plain if sinks else sunk))]
    if sinks:
        kept.append(row(when={"arch": archs, "kv_dtype": KV_DTYPES}, **sunk))
    scaled = {**plain, "kv_dtype": FP8, "kv_scales": ("", "tensor"), "lowered": {"kv_scales": "dequantise_kv"}}
    return (*kept, row(when={"arch": archs, "kv_dtype": FP8}, **scaled))


_LATENT_LENGTHS: tuple[dict[str, Any], ...] = (
    {"s_relation": ("equal", "fewer", "more"), "causal": "bottom_right"},
    {"s_relation": "one", "causal": CAUSAL},
)

INTEL_XPU = BackendInfo(
    "intel_xpu",
    "xpu",
    (
        Provider(
            "sgl-kernel-xpu",
            _paged(SGL_ARCHS, (64, 128), {"head_dim": 64}),
            target="polyattn_xpu.sgl_kernel:PagedSglKernel",
            requires=(SGL_KERNEL_XPU,),
        ),
        Provider(
            "sgl-kernel-xpu-mla",
            tuple(
                row(
                    when={"arch": SGL_ARCHS, "kv_dtype": LATENT_DTYPES},
                    **SERVING,
                    **lengths,
                    family="mla",
                    dims=((576, 512),),
                    group=Range(1, 128),
                    page_size=(16, 32, 64, 128),
                    kv_dtype="auto",
                )
                for lengths in _LATENT_LENGTHS
            ),
            target="polyattn_xpu.sgl_kernel:LatentSglKernel",
            requires=(SGL_KERNEL_XPU,),
        ),
        Provider(
            "vllm-xpu-kernels",
            (
                *_paged(VLLM_ARCHS, (16, 32), {}),
                *_paged(VLLM_ARCHS, Range(64, multiple_of=64), {}),
            ),
            target="polyattn_xpu.vllm_kernels:PagedVLLM",
            requires=(VLLM_XPU_KERNELS,),
        ),
    ),
    summary="Intel's FlashAttention on paged and latent caches",
    priority=80,
    auto=(
        AutoRule(100, "XPU: intel_xpu", conditions(family="paged")),
        AutoRule(200, "MLA on XPU: intel_xpu", conditions(family="mla")),
    ),
    config=(
        ConfigField(
            "free_slots",
            "str",
            "any",
            "what a cache holds where no token is: any = pages are copied without it; finite = a promise that it is a "
            "number, so that pages are read where they are",
            choices=("any", "finite"),
        ),
    ),
    evidence="emulator",
    upstream="https://github.com/sgl-project/sgl-kernel-xpu",
    note="its kernels multiply free slots of a page by 0: pages are copied unless the option free_slots says finite; "
    "SGLang's page denies FP8 caches, the kernels read them with one scale each",
)

BACKENDS: tuple[BackendInfo, ...] = (INTEL_XPU,)
