"""Serving: `aiter` on paged and latent caches (and dense, where it is asked for by name), and `wave`.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.contract import (
    AutoRule,
    BackendInfo,
    ConfigField,
    Provider,
    Range,
    Requirement,
    Row,
    Window,
    conditions,
    row,
)

from .common import (
    ABSORBED,
    AITER,
    AITER_0_1_20,
    ANY_TREE,
    ASSEMBLY_ARCHS,
    CAUSAL,
    CK_ARCHS,
    DEQUANTISE,
    FP8_ARCHS,
    HALF,
    KV_DTYPES,
    LATENT_DTYPES,
    LENGTHS,
    NO_TREE,
    PHASES,
    PREFILL_HEADS,
    RDNA,
    SINKS,
    TREE,
    UNIFIED_PAGES,
    WINDOWS,
)
from .dense import AITER_DENSE, AITER_DENSE_0_1_7

SERVING: dict[str, Any] = {
    "phase": PHASES,
    "group": True,
    "scale": True,
    "save_kv_cache": True,
    "graph_capture": True,
}
PAGED: dict[str, Any] = {
    **SERVING,
    "family": "paged",
    "dtype": HALF,
    "softcap": True,
    "multimodal": True,
}


def _batch_prefill(*, sinks: bool) -> tuple[Row, ...]:
    """Composable Kernel's prefill over single tokens, which any page is cut into by a view; decode too. It returns an
    LSE, and with it come sinks of older versions, and trees."""
    when = {"arch": CK_ARCHS, "kv_dtype": KV_DTYPES}
    base = {
        **PAGED,
        "kv_dtype": "auto",
        "head_dim": Range(8, 256, multiple_of=8),
        "causal": CAUSAL,
        "page_size": Range(1),
        "spec_topk": ANY_TREE,
    }
    rows = []
    for shape in ({**base, **lengths} for lengths in WINDOWS):
        rows.append(row(when=when, lowered={**DEQUANTISE, **TREE, **SINKS}, **shape, lse=True))
        if sinks:
            rows.append(row(when=when, lowered={**DEQUANTISE, **TREE}, **shape, sinks=True))
    return tuple(rows)


def _unified() -> tuple[Row, ...]:
    """AITER's Triton kernel, where Composable Kernel's cannot: FP8 caches with queries as they are, and RDNA chips. It
    is always causal: without a mask it serves one query at a time."""
    base = {
        **PAGED,
        "head_dim": Range(16, 256, multiple_of=8),
        "page_size": UNIFIED_PAGES,
        "window": Window(right=False),
        "sinks": True,
        "spec_topk": NO_TREE,
    }
    fp8: dict[str, Any] = {"kv_dtype": "fp8_e4m3", "kv_scales": ("", "tensor")}
    rows = []
    for relations, causal in (("one", CAUSAL), (("equal", "fewer"), "bottom_right")):
        shared = {**base, "s_relation": relations, "causal": causal}
        rows.append(row(when={"arch": FP8_ARCHS, "kv_dtype": ("fp8_e4m3",)}, **shared, **fp8))
        rows.append(row(when={"arch": RDNA, "kv_dtype": KV_DTYPES}, lowered=DEQUANTISE, **shared, kv_dtype="auto"))
    return tuple(rows)


def _latent(archs: tuple[str, ...], heads: tuple[int, ...], *, lse: bool, capture: bool) -> Row:
    return row(
        when={"arch": archs, "kv_dtype": LATENT_DTYPES},
        lowered=DEQUANTISE,
        **{**SERVING, "graph_capture": capture},
        spec_topk=NO_TREE,
        family="mla",
        dtype="bfloat16",
        dims=(ABSORBED,),
        heads=heads,
        page_size=Range(1),
        kv_dtype="auto",
        s_relation=LENGTHS,
        causal=CAUSAL,
        lse=lse,
        chunked_prefix=lse,
    )


# A kernel for each number of heads (hsa/*/mla/mla_asm.csv); that for 64 on gfx942 is not found for one query.
LATENT = (
    _latent(("gfx942",), (8, 16, 32, 128), lse=True, capture=True),
    _latent(("gfx950",), (8, 16, 32, 64, 128), lse=True, capture=True),
)
LATENT_0_1_7 = (_latent(ASSEMBLY_ARCHS, PREFILL_HEADS, lse=False, capture=False),)

AITER_BACKEND = BackendInfo(
    "aiter",
    "rocm",
    (
        Provider("amd-aiter/triton", _unified(), "polyattn_rocm.aiter.serving:Aiter", (AITER_0_1_20,)),
        Provider(
            "amd-aiter",
            (*LATENT, *_batch_prefill(sinks=True), *AITER_DENSE),
            "polyattn_rocm.aiter.serving:Aiter",
            (AITER_0_1_20,),
        ),
        Provider(
            "amd-aiter-0.1.7",
            (*LATENT_0_1_7, *_batch_prefill(sinks=False), *AITER_DENSE_0_1_7),
            "polyattn_rocm.aiter.serving:Aiter017",
            (AITER,),
        ),
    ),
    summary="AMD's AITER kernels",
    priority=85,
    auto=(
        AutoRule(100, "ROCm: aiter", conditions(family="paged")),
        AutoRule(200, "MLA on ROCm with 16 or 128 heads: aiter", conditions(family="mla", heads=PREFILL_HEADS)),
    ),
    evidence="emulator",
    config=(
        ConfigField(
            "free_slots",
            "str",
            "any",
            "what a cache holds where no token is: any = Triton kernels that read such slots are given copies of the "
            "pages without them, or are not used; finite = a promise that it is a number, so that decode splits the "
            "keys of pages of 16 to 64 tokens too",
            choices=("any", "finite"),
        ),
    ),
    upstream="https://github.com/ROCm/aiter",
    note="kernels compile at their first call, for minutes; 0.1.7 (PyPI) and 0.1.20 differ in what they take; on "
    "gfx942 an FP8 cache is dequantised, as its e4m3 is not that of the chip; no trees of drafts on RDNA chips: the "
    "kernel there returns no LSE, by which parts of a tree are put together",
)

SGLANG = Requirement("sglang", ">=0.5.20", module="sglang", hint="pip install sglang")
WAVE_COMMON: dict[str, Any] = {
    "when": {"arch": ASSEMBLY_ARCHS, "kv_dtype": KV_DTYPES},
    "family": "paged",
    "dtype": HALF,
    "head_dim": (64, 128),
    "page_size": Range(1),
    "kv_dtype": "auto",
    "phase": ("prefill", "extend", "decode"),
    "causal": CAUSAL,
    "group": True,
    "softcap": True,
    "save_kv_cache": True,
}

WAVE = BackendInfo(
    "wave",
    "rocm",
    (
        Provider(
            "wave-lang",
            (
                row(
                    **WAVE_COMMON,
                    s_relation="one",
                    lowered={**DEQUANTISE, "scale": "fold_scale"},
                    note="decode_attention_wave, which scales by D ** -0.5 whatever it is told",
                ),
                row(
                    **WAVE_COMMON,
                    s_relation=("equal", "fewer"),
                    scale=True,
                    lowered=DEQUANTISE,
                    note="extend_attention_wave",
                ),
            ),
            "polyattn_rocm.wave:Wave",
            (Requirement("wave-lang", module="wave_lang", hint="pip install wave-lang"), SGLANG),
        ),
    ),
    summary="Wave kernels on paged caches",
    priority=15,
    evidence="emulator",
    compiles=True,
    upstream="https://github.com/iree-org/wave",
    note="SGLang has the calls of its kernels. A program is compiled for each number of sequences, and of queries in "
    "extend; decode drops the scale, which is folded into the queries",
)

BACKENDS = (AITER_BACKEND, WAVE)
