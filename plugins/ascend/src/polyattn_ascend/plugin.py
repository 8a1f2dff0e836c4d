"""The plugin of Ascend NPUs: `ascend` in serving, `fa` on dense and packed batches, both through torch_npu.

To change what an operator takes, edit its row: an option that is not named there is refused, with a reason. Masks
here are polyattn's (True = attend); the operators want the inverse, and their scale defaults to 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyattn.hookspecs import hookimpl
from polyattn.records import (
    AtLeast,
    AutoRule,
    BackendInfo,
    Fallback,
    Provider,
    Range,
    Requirement,
    Window,
    conditions,
    row,
)

__all__ = ["BACKENDS", "polyattn_register_backends"]

POLYATTN_API_VERSION = 1

TORCH_NPU = Requirement(
    "torch-npu",
    module="torch_npu",
    hint="install CANN, then pip install torch-npu in the version of your torch",
)
UPSTREAM = "https://github.com/Ascend/pytorch"

HALF = ("bfloat16", "float16")
LENGTHS = ("equal", "one", "fewer", "more")
NO_TREE = Range(0, 1)

# Exact rewrites. A cache dtype that an operator cannot read is dequantised by pages; KV_DTYPES is what that knows.
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8")
DEQUANTISE = {"kv_dtype": "dequantise_kv", "kv_scales": "dequantise_kv"}
SINKS = {"sinks": "sinks_from_lse"}

# npu_fusion_attention. Its statistics give the LSE: max + log(sum). No softcap.
FUSION: dict[str, Any] = {
    "dtype": (*HALF, "float32"),
    "heads": Range(1, 256),
    "s_relation": LENGTHS,
    "causal": ("none", "bottom_right", "top_left"),
    "window": Window(),
    "group": True,
    "scale": True,
    "dropout": True,
    "cross": True,
    "multimodal": True,
    "grad": ("query", "key", "value"),
}
WIDTHS = ({"head_dim": Range(1, 768)}, {"dims": ((192, 128),)})
# It takes sinks itself from CANN 8.5 on; whether its statistics then include them is unknown, so not with an LSE.
FUSION_ROWS = tuple(
    r
    for width in WIDTHS
    for family, mask in (("dense", ("none", "bool")), ("varlen", "none"))
    for r in (
        row(**FUSION, **width, family=family, mask=mask, lse=True, lowered=SINKS),
        row(
            when={"toolkit": AtLeast((8, 5))},
            **{**FUSION, "grad": ()},
            **width,
            family=family,
            mask=mask,
            sinks=True,
        ),
    )
)

FA = BackendInfo(
    "fa",
    "npu",
    (Provider("torch-npu", FUSION_ROWS, requires=(TORCH_NPU,)),),
    summary="torch_npu's fused attention on dense and packed batches",
    priority=40,
    fallbacks=(Fallback("torch_sdpa", "torch_npu is not installed or the call is outside the operator's limits"),),
    auto=(
        AutoRule(
            300,
            "NPU: fa where the LSE is wanted (ring attention), else torch_sdpa",
            conditions(family=("dense", "varlen"), lse=(True,)),
        ),
    ),
    upstream=UPSTREAM,
    note="fa3 and fa4 are no aliases here: there is one fused operator",
)

# npu_fused_infer_attention_score. Pages of 128 satisfy every phase and layout it has.
SERVING: dict[str, Any] = {
    "dtype": HALF,
    "page_size": 128,
    "kv_dtype": "auto",
    "s_relation": ("equal", "one", "fewer"),
    "causal": ("none", "bottom_right"),
    "scale": True,
    "save_kv_cache": True,
    "graph_capture": True,
    "deterministic": True,
}
PAGED: dict[str, Any] = {
    **SERVING,
    "family": "paged",
    "phase": ("prefill", "extend", "decode", "verify"),
    "kv_layout": ("", "NHD", "HND", "NZ"),
    "heads": Range(1, 256),
    "group": Range(1, 64),
    "window": Window(),
    "multimodal": True,
    "spec_topk": NO_TREE,
}
CACHE = {"kv_dtype": KV_DTYPES}

ASCEND_ROWS = (
    row(when=CACHE, lowered={**DEQUANTISE, **SINKS}, **PAGED, head_dim=Range(16, 512, multiple_of=16), lse=True),
    row(when=CACHE, lowered={**DEQUANTISE, **SINKS}, **PAGED, dims=((192, 128),), lse=True),
    # Sinks of the newer operator: bfloat16, packed layout.
    row(when=CACHE, lowered=DEQUANTISE, **{**PAGED, "dtype": "bfloat16"}, head_dim=(64, 128), sinks=True),
    # Latent attention has no LSE at 512 and wants a power of two of heads.
    row(
        when=CACHE,
        lowered=DEQUANTISE,
        **SERVING,
        family="mla",
        phase=("prefill", "extend", "decode"),
        dims=((576, 512),),
        heads=(1, 2, 4, 8, 16, 32, 64, 128),
        group=True,
        kv_layout=("", "NHD", "NZ"),
    ),
    row(
        when=CACHE,
        lowered=DEQUANTISE,
        **SERVING,
        family="mla",
        phase=("prefill", "extend"),
        dims=((192, 128),),
        heads=Range(1, 256),
        group=True,
        lse=True,
    ),
)

ASCEND = BackendInfo(
    "ascend",
    "npu",
    (Provider("torch-npu", ASCEND_ROWS, requires=(TORCH_NPU,)),),
    summary="torch_npu's fused attention on paged and latent caches",
    priority=80,
    auto=(
        AutoRule(100, "NPU: ascend", conditions(family="paged")),
        AutoRule(200, "MLA on NPU: ascend", conditions(family="mla")),
    ),
    upstream=UPSTREAM,
    note="pages of 128; sequence lengths are read on the host; a window at decode needs proof on the chip, since "
    "vendor documents and call sites disagree by one key",
)

BACKENDS: tuple[BackendInfo, ...] = (FA, ASCEND)


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """Every Ascend backend polyattn knows."""
    return BACKENDS
