"""The `triton` backend: dense, packed, paged, latent and block-sparse softmax attention.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyattn.records import AutoRule, BackendInfo, Provider, Range, Row, Window, conditions, row

from .common import (
    ANY_PAGE,
    ANY_TREE,
    BY_TOKENS,
    CHUNKED,
    DEQUANTISE,
    HALF,
    INTERPRETED,
    KV_DTYPES,
    LENGTHS,
    NO_TREE,
    PHASES,
    PLATFORMS,
    TRAINABLE,
    TRITON,
)
from .linear import linear_rows

ATTENTION: dict[str, Any] = {
    "dtype": (*HALF, "float32"),
    "head_dim": Range(16, 256, multiple_of=8),
    "v_head_dim": Range(16, 256, multiple_of=8),
    "s_relation": LENGTHS,
    "group": True,
    "scale": True,
    "window": Window(),
    "chunk": True,
    "softcap": True,
    "sinks": True,
    "mask": ("none", "bool", "additive"),
    "tree": True,
    "lse": True,
    "multimodal": True,
}
SERVING: dict[str, Any] = {
    "phase": PHASES,
    "causal": ("none", "bottom_right"),
    "save_kv_cache": True,
    "deterministic": True,
    "batch_invariant": True,
    "graph_capture": True,
}
CACHE = {"kv_dtype": KV_DTYPES}
FP8_CACHE: dict[str, Any] = {"kv_dtype": ("auto", "fp8_e4m3", "fp8_e5m2"), "kv_scales": ("", "tensor", "head", "token")}

DENSE = row(
    **ATTENTION,
    family=("dense", "varlen"),
    causal=("none", "bottom_right", "top_left"),
    alibi=True,
    cross=True,
    grad=TRAINABLE,
)
# The kernel reads one page table entry per token; larger pages are expanded to that.
PAGED = row(
    when=CACHE,
    lowered={**DEQUANTISE, **BY_TOKENS},
    **ATTENTION,
    **SERVING,
    **FP8_CACHE,
    family="paged",
    page_size=1,
    spec_topk=ANY_TREE,
)
# Latent caches: draft trees at page size 1 only, and a cache in the dtype of q.
LATENT: dict[str, Any] = {
    **SERVING,
    "family": "mla",
    "dtype": HALF,
    "dims": ((576, 512), (192, 128)),
    "kv_dtype": "auto",
    "s_relation": LENGTHS,
    "group": True,
    "scale": True,
    "lse": True,
}
MLA = (
    row(when={**CACHE, "spec_topk": NO_TREE}, lowered={**DEQUANTISE, **CHUNKED}, **LATENT, page_size=ANY_PAGE),
    row(when=CACHE, lowered={**DEQUANTISE, **CHUNKED}, **LATENT, page_size=1, spec_topk=ANY_TREE, tree=True),
)
BLOCK_SPARSE = row(
    family="block_sparse",
    dtype=HALF,
    head_dim=(64, 128, 256),
    s_relation=LENGTHS,
    group=True,
    scale=True,
    block_map=True,
    block_sizes=True,
    lse=True,
    grad=TRAINABLE,
)
SOFTMAX: tuple[Row, ...] = (DENSE, PAGED, *MLA, BLOCK_SPARSE)


def _rules(platform: str) -> Iterable[AutoRule]:
    yield AutoRule(400, "linear attention: triton unless another kernel is asked for", conditions(family="linear"))
    if platform != "cpu":
        # Before torch's own backends, which gather the pages first.
        yield AutoRule(190, "serving where no other rule serves: triton", conditions(family="paged"))
        yield AutoRule(290, "MLA where no other rule serves: triton", conditions(family="mla"))


BACKENDS: tuple[BackendInfo, ...] = tuple(
    BackendInfo(
        "triton",
        platform,
        (Provider("polyattn-triton", (*SOFTMAX, *linear_rows(platform)), requires=(TRITON[platform],)),),
        summary="polyattn's portable Triton kernels",
        priority=INTERPRETED if platform == "cpu" else 40,
        auto=tuple(_rules(platform)),
        upstream="polyattn",
        note="runs under Triton's interpreter: correct and very slow" if platform == "cpu" else "",
    )
    for platform in PLATFORMS
)
