"""The plugin of Intel hardware: `fa` and `intel_xpu` on its GPUs, `intel_amx` on CPUs with AMX.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyattn.hookspecs import hookimpl
from polyattn.records import (
    Alias,
    AutoRule,
    BackendInfo,
    Fallback,
    Has,
    Provider,
    Range,
    Requirement,
    Window,
    conditions,
    row,
)

__all__ = ["BACKENDS", "polyattn_register_backends"]

POLYATTN_API_VERSION = 1

SGL_KERNEL_XPU = Requirement(
    "sgl-kernel-xpu",
    module="sgl_kernel.flash_attn",
    hint="build https://github.com/sgl-project/sgl-kernel-xpu; it is not on PyPI",
    impostor="sgl-kernel, a build for CUDA",
    also=("sgl-kernel",),
)
VLLM_XPU_KERNELS = Requirement(
    "vllm-xpu-kernels", module="vllm_xpu_kernels.flash_attn_interface", hint="pip install vllm-xpu-kernels"
)
SGL_KERNEL_CPU = Requirement(
    "sgl-kernel-cpu",
    module="sgl_kernel",
    hint="build the CPU kernels of https://github.com/sgl-project/sglang (sgl-kernel); they are not on PyPI",
    impostor="sgl-kernel, a build for CUDA",
    also=("sgl-kernel",),
)

HALF = ("bfloat16", "float16")
CAUSAL = ("none", "bottom_right")
LENGTHS = ("equal", "one", "fewer", "more")
PHASES = ("prefill", "extend", "decode", "verify")

# Exact rewrites. A cache dtype that a kernel cannot read is dequantised by pages; KV_DTYPES is what that knows.
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8")
DEQUANTISE = {"kv_dtype": "dequantise_kv", "kv_scales": "dequantise_kv"}
BY_TOKENS = {"page_size": "page_table_to_tokens"}
SINKS = {"sinks": "sinks_from_lse"}

DENSE: dict[str, Any] = {
    "family": ("dense", "varlen"),
    "dtype": HALF,
    "head_dim": (64, 96, 128, 192, 256),
    "s_relation": LENGTHS,
    "causal": CAUSAL,
    "group": Range(1, 16),
    "scale": True,
    "window": Window(),
    "cross": True,
    "multimodal": True,
}

FA = BackendInfo(
    "fa",
    "xpu",
    (
        Provider(
            "fa3/sgl-kernel-xpu",
            (
                row(**DENSE, softcap=True, lse=True, lowered=SINKS),
                # Sinks exist for the shapes of gpt-oss.
                row(**{**DENSE, "dtype": "bfloat16", "head_dim": 64}, softcap=True, sinks=True),
            ),
            requires=(SGL_KERNEL_XPU,),
        ),
        # Softcap and ALiBi are accepted and ignored there, and rows of one query have no LSE: neither is declared.
        Provider("vllm-xpu-kernels", (row(**DENSE, sinks=True),), requires=(VLLM_XPU_KERNELS,)),
    ),
    summary="Intel's FlashAttention on dense and packed batches",
    priority=60,
    aliases=(Alias("fa3", ("dense", "varlen"), provider="fa3"),),
    fallbacks=(Fallback("torch_sdpa", "FlashAttention is not installed or the call is outside its limits"),),
    auto=(AutoRule(300, "XPU: FlashAttention within its limits", conditions(family=("dense", "varlen"))),),
    upstream="https://github.com/sgl-project/sgl-kernel-xpu",
)

SERVING: dict[str, Any] = {
    "when": {"kv_dtype": KV_DTYPES},
    "lowered": DEQUANTISE,
    "dtype": HALF,
    "phase": PHASES,
    "s_relation": LENGTHS,
    "causal": CAUSAL,
    "scale": True,
    "save_kv_cache": True,
    "graph_capture": True,
    "deterministic": True,
    "spec_topk": Range(0, 1),
}
PAGED: dict[str, Any] = {
    **SERVING,
    "family": "paged",
    "head_dim": (64, 96, 128, 192, 256, 512),
    "group": Range(1, 16),
    "page_size": (64, 128),
    "kv_dtype": ("auto", "fp8_e4m3", "fp8_e5m2"),
    "kv_scales": ("", "tensor"),
    "window": Window(),
    "softcap": True,
}

INTEL_XPU = BackendInfo(
    "intel_xpu",
    "xpu",
    (
        Provider(
            "sgl-kernel-xpu",
            (
                row(**PAGED),
                row(**{**PAGED, "dtype": "bfloat16", "head_dim": 64}, sinks=True),
                # The LSE is written for one query per sequence only.
                row(**{**PAGED, "s_relation": "one", "lowered": {**DEQUANTISE, **SINKS}}, lse=True),
                row(
                    **SERVING,
                    family="mla",
                    dims=((576, 512), (192, 128)),
                    group=True,
                    page_size=(16, 32, 64, 128),
                    kv_dtype="auto",
                ),
            ),
            requires=(SGL_KERNEL_XPU,),
        ),
    ),
    summary="Intel's FlashAttention on paged and latent caches",
    priority=80,
    auto=(
        AutoRule(100, "XPU: intel_xpu", conditions(family="paged")),
        AutoRule(200, "MLA on XPU: intel_xpu", conditions(family="mla")),
    ),
    upstream="https://github.com/sgl-project/sgl-kernel-xpu",
    note="pages of 64 or 128; SGLang's page denies FP8 caches, its kernel reads them with scales per tensor",
)

AMX: dict[str, Any] = {
    "when": {"features": Has("amx"), "kv_dtype": KV_DTYPES},
    "lowered": {**DEQUANTISE, **BY_TOKENS},
    "dtype": HALF,
    "phase": ("prefill", "extend", "decode"),
    "s_relation": ("equal", "one", "fewer"),
    "causal": CAUSAL,
    "group": True,
    "scale": True,
    "page_size": 1,
    "kv_dtype": "auto",
    "save_kv_cache": True,
}

INTEL_AMX = BackendInfo(
    "intel_amx",
    "cpu",
    (
        Provider(
            "sgl-kernel-cpu",
            (
                row(**AMX, family="paged", head_dim=Range(16, 256, multiple_of=16), softcap=True),
                row(**AMX, family="mla", dims=((576, 512),)),
            ),
            requires=(SGL_KERNEL_CPU,),
        ),
    ),
    summary="AMX kernels on paged and latent caches",
    priority=80,
    fallbacks=(
        Fallback("torch_native", "this CPU has no AMX, which the kernels need", conditions(features=Has("amx", False))),
    ),
    auto=(
        AutoRule(100, "x86 CPU with AMX: intel_amx", conditions(family="paged", features=Has("amx"))),
        AutoRule(200, "MLA on an x86 CPU with AMX: intel_amx", conditions(family="mla", features=Has("amx"))),
    ),
    upstream="https://github.com/sgl-project/sglang/tree/main/sgl-kernel",
    note="newer builds also take windows, sinks and tree masks; they are declared once their schema can be read",
)

BACKENDS: tuple[BackendInfo, ...] = (FA, INTEL_XPU, INTEL_AMX)


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """Every backend polyattn knows on Intel GPUs and AMX CPUs."""
    return BACKENDS
