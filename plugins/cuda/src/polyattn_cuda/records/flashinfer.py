"""FlashInfer: its own paged and latent kernels, and the TensorRT-LLM and CuTe DSL kernels that it carries.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.records import Alias, AutoRule, BackendInfo, Provider, Row, Window, conditions, row

from .common import (
    ABSORBED,
    AMPERE_AND_LATER,
    ANY_PAGE,
    ANY_TREE,
    BLACKWELL,
    BY_TOKENS,
    DEQUANTISE,
    FLASHINFER,
    HALF,
    HOPPER,
    KV_DTYPES,
    LENGTHS,
    NO_TREE,
    PHASES,
    SERVING,
    SINKS,
    UNABSORBED,
)

UPSTREAM = "https://github.com/flashinfer-ai/flashinfer"
DECODING: dict[str, Any] = {"phase": ("decode", "verify"), "s_relation": ("one", "fewer")}
PREFILLING: dict[str, Any] = {"phase": ("prefill", "extend"), "s_relation": ("equal", "fewer", "more")}


def _wrappers(width: dict[str, Any]) -> tuple[Row, ...]:
    """The plan-and-run wrappers (fa2 and fa3 templates). They fold sinks into their LSE."""
    when = {"arch": AMPERE_AND_LATER, "kv_dtype": KV_DTYPES}
    base: dict[str, Any] = {
        **SERVING,
        **width,
        "family": "paged",
        "page_size": ANY_PAGE,
        "kv_layout": ("", "NHD", "HND"),
        "kv_dtype": ("auto", "fp8_e4m3", "fp8_e5m2"),
        "kv_scales": ("", "tensor"),
        "window": Window(right=False),
        "softcap": True,
        "mask": ("none", "bool"),
        "tree": True,
        "spec_topk": ANY_TREE,
        "cross": True,
        "deterministic": True,
        "batch_invariant": True,
        "graph_capture": True,
    }
    return (
        row(when=when, lowered=DEQUANTISE, **base, sinks=True),
        row(when=when, lowered={**DEQUANTISE, **SINKS}, **base, lse=True),
    )


def _gdn(archs: tuple[str, ...], state_dtype: str) -> Row:
    """Gated delta net. Drafts are verified as a chain; a tree goes to the triton backend."""
    return row(
        when={"arch": archs},
        family="linear",
        method="gdn",
        dtype=HALF,
        head_dim=128,
        state_dtype=("", state_dtype) if state_dtype == "float32" else state_dtype,
        state_layout=("", "VK"),
        phase=PHASES,
        s_relation=LENGTHS,
        causal=True,
        group=True,
        scale=True,
        spec_topk=NO_TREE,
        note="state in float32 on Hopper and in bfloat16 on Blackwell",
    )


FLASHINFER_MHA = BackendInfo(
    "flashinfer",
    "cuda",
    (
        Provider(
            "flashinfer-python",
            (
                *_wrappers({"head_dim": (64, 128, 256)}),
                *_wrappers({"dims": (UNABSORBED,)}),
                _gdn(HOPPER, "float32"),
                _gdn(BLACKWELL, "bfloat16"),
            ),
            requires=(FLASHINFER,),
        ),
    ),
    summary="FlashInfer on paged caches, and gated delta nets",
    priority=80,
    auto=(
        AutoRule(
            150,
            "CUDA without a rule of its own, FlashInfer installed, no sinks: flashinfer",
            conditions(family="paged", sinks=(False,)),
        ),
    ),
    upstream=UPSTREAM,
    note="plan() is host work and stays outside graphs",
)

FLASHINFER_MLA = BackendInfo(
    "flashinfer_mla",
    "cuda",
    (
        Provider(
            "flashinfer-python",
            (
                row(
                    when={"arch": AMPERE_AND_LATER, "kv_dtype": KV_DTYPES},
                    lowered={**DEQUANTISE, **BY_TOKENS},
                    **SERVING,
                    family="mla",
                    dims=(ABSORBED, UNABSORBED),
                    page_size=1,
                    kv_dtype="auto",
                    lse=True,
                    chunked_prefix=True,
                    spec_topk=NO_TREE,
                    graph_capture=True,
                ),
            ),
            requires=(FLASHINFER,),
        ),
    ),
    summary="FlashInfer on latent caches",
    priority=78,
    upstream=UPSTREAM,
)

TRTLLM: dict[str, Any] = {
    **SERVING,
    "family": "paged",
    "head_dim": (64, 128, 256),
    "page_size": (16, 32, 64),
    "kv_layout": ("", "NHD", "HND"),
    "window": Window(right=False),
    "spec_topk": NO_TREE,
    "graph_capture": True,
}
TRTLLM_KV: dict[str, Any] = {"kv_dtype": ("auto", "fp8_e4m3", "fp4_e2m1"), "kv_scales": ("", "tensor")}
XQA_KV: dict[str, Any] = {"kv_dtype": ("auto", "fp8_e4m3"), "kv_scales": ("", "tensor")}


def _trtllm(archs: tuple[str, ...], **limits: Any) -> Row:
    return row(when={"arch": archs, "kv_dtype": KV_DTYPES}, lowered=DEQUANTISE, **{**TRTLLM, **limits}, sinks=True)


TRTLLM_MHA = BackendInfo(
    "trtllm_mha",
    "cuda",
    (
        Provider(
            "flashinfer-python",
            (
                # trtllm-gen on data-centre Blackwell: every phase.
                _trtllm(BLACKWELL, **TRTLLM_KV),
                row(
                    when={"arch": BLACKWELL, "kv_dtype": KV_DTYPES},
                    lowered={**DEQUANTISE, **SINKS},
                    **TRTLLM,
                    **TRTLLM_KV,
                    lse=True,
                ),
                # XQA elsewhere: decode and verification, no LSE. SM120 also prefills, but not over an FP8 cache.
                _trtllm(("sm90", "sm120"), **XQA_KV, **DECODING),
                _trtllm(("sm120",), kv_dtype="auto", **PREFILLING),
            ),
            requires=(FLASHINFER,),
        ),
    ),
    summary="TensorRT-LLM kernels on paged caches",
    priority=86,
    auto=(
        AutoRule(
            110,
            "Blackwell, K and V of one width, no draft tree: trtllm_mha",
            conditions(family="paged", arch=BLACKWELL, same_dims=(True,), spec_topk=NO_TREE),
        ),
    ),
    upstream=UPSTREAM,
    note="pages of 16, 32 or 64; SGLang also lets some models use 128, polyattn keeps to the documented sizes",
)

TRTLLM_MLA = BackendInfo(
    "trtllm_mla",
    "cuda",
    (
        Provider(
            "flashinfer-python",
            (
                row(
                    when={"arch": BLACKWELL, "kv_dtype": KV_DTYPES},
                    lowered=DEQUANTISE,
                    **SERVING,
                    family="mla",
                    dims=(ABSORBED, UNABSORBED),
                    page_size=(32, 64),
                    kv_dtype=("auto", "fp8_e4m3"),
                    kv_scales=("", "tensor"),
                    lse=True,
                    chunked_prefix=True,
                    spec_topk=NO_TREE,
                    graph_capture=True,
                ),
            ),
            requires=(FLASHINFER,),
        ),
    ),
    summary="TensorRT-LLM kernels on latent caches",
    priority=84,
    auto=(AutoRule(210, "MLA on Blackwell: trtllm_mla", conditions(family="mla", arch=BLACKWELL)),),
    upstream=UPSTREAM,
    note="FP4 caches are dequantised by pages; SGLang's page lists FP4, its code refuses it",
)


def _cutedsl(**kv: Any) -> Row:
    return row(
        when={"arch": BLACKWELL, "kv_dtype": KV_DTYPES},
        family="mla",
        dims=(ABSORBED,),
        page_size=(32, 64),
        chunked_prefix=True,
        spec_topk=NO_TREE,
        graph_capture=True,
        **{**SERVING, **DECODING, **kv},
    )


CUTEDSL_MLA = BackendInfo(
    "cutedsl_mla",
    "cuda",
    (
        Provider(
            "cutedsl/flashinfer-python",
            (_cutedsl(kv_dtype=("auto", "fp8_e4m3"), kv_scales=("", "tensor"), lowered=DEQUANTISE),),
            requires=(FLASHINFER,),
        ),
        Provider(
            "tokenspeed/flashinfer-python",
            (_cutedsl(kv_dtype="fp8_e4m3", kv_scales=("", "tensor")),),
            requires=(FLASHINFER,),
        ),
    ),
    summary="CuTe DSL kernels on latent caches, decode only",
    priority=70,
    aliases=(Alias("tokenspeed_mla", ("mla",), provider="tokenspeed"),),
    upstream=UPSTREAM,
    note="decode and verification only: pair it with a prefill backend such as trtllm_mla. The name tokenspeed_mla "
    "needs an FP8 cache",
)

BACKENDS = (FLASHINFER_MHA, FLASHINFER_MLA, TRTLLM_MHA, TRTLLM_MLA, CUTEDSL_MLA)
