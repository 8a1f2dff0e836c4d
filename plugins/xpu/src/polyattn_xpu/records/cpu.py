"""Intel CPUs: `intel_amx` by SGLang's CPU kernels, and `ipex`, which is there by name only.

From the kernels' sources (sgl-kernel/csrc/cpu/{decode,extend}.cpp): 16-bit dtypes, token-level caches, no LSE, no
window; extend is causal, wants widths that are multiples of 32 and ignores a softcap; decode stores the new rows by
itself. Builds since 0.4.5 take windows, sinks and tree masks too; others of the same time take scales in their place,
and a version does not tell them apart, so neither is declared.
"""

from __future__ import annotations

from typing import Any

from polyattn.contract import AutoRule, BackendInfo, Fallback, Has, Provider, Range, conditions, row

from .common import BY_TOKENS, CAUSAL, DEQUANTISE, HALF, IPEX, KV_DTYPES, LATENT_DTYPES, SGL_KERNEL_CPU, TORCH_OF_IPEX

__all__ = ["BACKENDS"]

WIDTH = Range(32, 256, multiple_of=32)
# Its float16 products are torch's brgemm of keys in pairs of rows, which a CPU without AMX-FP16 reads as plain ones:
# wrong results, on a Xeon with torch 2.13. One with it was not at hand.
AMX: dict[str, Any] = {
    "lowered": {**DEQUANTISE, **BY_TOKENS},
    "dtype": "bfloat16",
    "group": True,
    "scale": True,
    "page_size": 1,
    "kv_dtype": "auto",
}
DECODE: dict[str, Any] = {"phase": ("extend", "decode"), "s_relation": "one", "causal": CAUSAL}
EXTEND: dict[str, Any] = {
    "phase": ("prefill", "extend"),
    "s_relation": ("equal", "fewer"),
    "causal": "bottom_right",
}
PAGED: dict[str, Any] = {
    "family": "paged",
    "when": {"features": Has("amx"), "kv_dtype": KV_DTYPES},
    "head_dim": WIDTH,
    "v_head_dim": WIDTH,
    "kv_layout": ("", "NHD"),
    "save_kv_cache": True,
}
LATENT: dict[str, Any] = {
    "family": "mla",
    "when": {"features": Has("amx"), "kv_dtype": LATENT_DTYPES},
    "dims": ((576, 512),),
}

INTEL_AMX = BackendInfo(
    "intel_amx",
    "cpu",
    (
        Provider(
            "sgl-kernel-cpu",
            (
                row(**AMX, **PAGED, **EXTEND),
                row(**AMX, **PAGED, **DECODE, softcap=True),
                row(**AMX, **LATENT, **EXTEND),
                row(**AMX, **LATENT, **DECODE),
            ),
            target="polyattn_xpu.sgl_kernel_cpu:IntelAMX",
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
    evidence="emulator",
    upstream="https://github.com/sgl-project/sglang/tree/main/sgl-kernel",
    note="some builds also take windows, sinks and tree masks: not declared, a version does not tell which",
)

IPEX_VARLEN = BackendInfo(
    "ipex",
    "cpu",
    (
        Provider(
            "intel-extension-for-pytorch",
            tuple(
                row(
                    **lengths,
                    family="varlen",
                    dtype=("float32", *HALF),
                    head_dim=Range(1),
                    group=True,
                    cross=True,
                    lowered={"scale": "fold_scale"},
                )
                for lengths in (
                    {"causal": "bottom_right", "s_relation": "equal"},
                    {"causal": "none", "s_relation": ("equal", "one", "fewer", "more")},
                )
            ),
            target="polyattn_xpu.ipex:VarlenIPEX",
            requires=(IPEX, TORCH_OF_IPEX),
        ),
    ),
    summary="packed batches by Intel Extension for PyTorch, whose project has ended: for comparison only",
    priority=None,
    evidence="emulator",
    upstream="https://github.com/intel/intel-extension-for-pytorch",
    note="by name only: the project was archived in March 2026 with security advisories open, and its last version "
    "needs torch 2.8. It ignores softmax_scale, so other scales are folded into the queries",
)

BACKENDS: tuple[BackendInfo, ...] = (INTEL_AMX, IPEX_VARLEN)
