"""The `triton` backend: dense, packed, paged, latent and block-sparse softmax attention.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyattn.contract import AutoRule, BackendInfo, Provider, Range, Row, WiderThan, Window, conditions, row

from .common import (
    ANY_PAGE,
    ANY_TREE,
    HALF,
    INTERPRETED,
    LENGTHS,
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


def dense_row(platform: str) -> Row:
    """Dense and packed calls: kernels.forward and kernels.backward, which adds nothing by atomics."""
    return row(
        **ATTENTION,
        family=("dense", "varlen"),
        causal=("none", "bottom_right", "top_left"),
        cross=True,
        grad=(*TRAINABLE, "sinks", "lse"),
        deterministic=True,
        graph_capture=platform in ("cuda", "rocm"),
        zero_size=True,
        misaligned=True,
        large=True,
    )


STORED: tuple[dict[str, Any], ...] = (
    {"kv_dtype": "auto", "misaligned": True},
    {"kv_dtype": ("fp8_e4m3", "fp8_e5m2", "int8"), "kv_scales": ("", "tensor", "head", "token")},
    {"kv_dtype": "fp4_e2m1", "kv_scales": "block16"},
)
"""Caches that the kernels read, dequantised in registers."""


def paged_rows(platform: str) -> tuple[Row, ...]:
    """Paged calls: kernels.decode, kernels.extend, kernels.write. Pages of any size are read where they lie."""
    serving = {**SERVING, "graph_capture": platform in ("cuda", "rocm")}
    return tuple(
        row(
            **ATTENTION,
            **serving,
            **stored,
            family="paged",
            page_size=ANY_PAGE,
            kv_layout=("", "NHD", "HND"),
            kv_parts=Range(0),
            # A kernel walks along the prefix a block at a time anyway.
            chunked_prefix=True,
            spec_topk=ANY_TREE,
            cross=True,
            zero_size=True,
            large=True,
        )
        for stored in STORED
    )


def mla_rows(platform: str) -> tuple[Row, ...]:
    """Latent calls: kernels.latent. FP8 rows are dequantised in registers."""
    kernel: dict[str, Any] = {
        **{name: constraint for name, constraint in SERVING.items() if name != "save_kv_cache"},
        "family": "mla",
        "dtype": (*HALF, "float32"),
        "s_relation": LENGTHS,
        "group": True,
        "scale": True,
        "window": Window(),
        "chunk": True,
        "mask": ("none", "bool", "additive"),
        "tree": True,
        "spec_topk": ANY_TREE,
        "page_size": ANY_PAGE,
        "kv_parts": Range(0),
        "chunked_prefix": True,
        "lse": True,
        "cross": True,
        "multimodal": True,
        "graph_capture": platform in ("cuda", "rocm"),
        "zero_size": True,
        "large": True,
    }
    widths = {"head_dim": Range(16, 576, multiple_of=8), "v_head_dim": Range(16, 512, multiple_of=8)}
    return (
        row(kv_dtype="fp8_e4m3", kv_scales="block128", dims=((576, 512),), **kernel),
        row(kv_dtype=("fp8_e4m3", "fp8_e5m2"), kv_scales="", **widths, **kernel),
        row(kv_dtype="auto", misaligned=True, **widths, **kernel),
    )


def block_sparse_row(platform: str) -> Row:
    """Calls with a block map, forward and backward: kernels.block_sparse, which sums in one order, without atomics."""
    return row(
        family="block_sparse",
        dtype=(*HALF, "float32"),
        head_dim=(64, 128, 256),
        s_relation=LENGTHS,
        group=True,
        scale=True,
        block_map=(True,),
        block_shape=((64, 64), (128, 128), (128, 64), (64, 128)),
        block_sizes=True,
        block_starts=True,
        misaligned=True,
        lse=True,
        grad=(*TRAINABLE, "lse"),
        deterministic=True,
        batch_invariant=True,
        graph_capture=platform in ("cuda", "rocm"),
    )


def _rules(platform: str) -> Iterable[AutoRule]:
    if platform != "cpu":
        linear = conditions(family="linear")
        yield AutoRule(400, "linear attention: triton unless another kernel is asked for", linear)
    if platform == "cuda":
        windowed = conditions(family=("dense", "varlen"), window=WiderThan(0))
        yield AutoRule(380, "windows that FlashAttention does not serve: triton, which skips what they hide", windowed)
    if platform != "cpu":
        # Before torch's own backends, which gather the pages first.
        yield AutoRule(190, "serving where no other rule serves: triton", conditions(family="paged"))
        yield AutoRule(290, "MLA where no other rule serves: triton", conditions(family="mla"))


BACKENDS: tuple[BackendInfo, ...] = tuple(
    BackendInfo(
        "triton",
        platform,
        (
            Provider("dense", (dense_row(platform),), "polyattn_triton.dense:Dense", requires=(TRITON[platform],)),
            Provider("paged", paged_rows(platform), "polyattn_triton.paged:Paged", requires=(TRITON[platform],)),
            Provider(
                "block_sparse",
                (block_sparse_row(platform),),
                "polyattn_triton.block_sparse:BlockSparse",
                requires=(TRITON[platform],),
            ),
            Provider("latent", mla_rows(platform), "polyattn_triton.latent:Latent", requires=(TRITON[platform],)),
            Provider(
                "polyattn-triton", linear_rows(platform), "polyattn_triton.linear:Linear", requires=(TRITON[platform],)
            ),
        ),
        summary="polyattn's portable Triton kernels",
        priority=INTERPRETED if platform == "cpu" else 40,
        auto=tuple(_rules(platform)),
        # Where conformance has passed an evidence file says so. NVIDIA's other chips have the same kernels, which
        # Triton interprets in CI, through the compiler that was tried; and of AMD's an evidence file names those
        # that they were compiled for. Elsewhere nothing is chosen automatically.
        evidence="interpreter" if platform in ("cpu", "cuda") else "declared",
        upstream="polyattn",
        note="runs under Triton's interpreter (TRITON_INTERPRET=1): correct and very slow" if platform == "cpu" else "",
        compiles=True,
    )
    for platform in PLATFORMS
)
