"""Serving: `aiter` on paged and latent caches (and dense, where it is asked for by name), and `wave`.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.records import AutoRule, BackendInfo, Provider, Range, Requirement, Row, Window, conditions, row

from .common import (
    ABSORBED,
    AITER,
    AITER_0_1_20,
    ANY_TREE,
    CAUSAL,
    DEQUANTISE,
    FP8_INSTINCT,
    HALF,
    INSTINCT,
    KV_DTYPES,
    LENGTHS,
    NO_TREE,
    PHASES,
    SINKS,
    UNABSORBED,
)
from .dense import AITER_DENSE, AITER_SINKS

WHEN = {"arch": INSTINCT, "kv_dtype": KV_DTYPES}
SERVING: dict[str, Any] = {
    "dtype": HALF,
    "phase": PHASES,
    "group": True,
    "scale": True,
    "save_kv_cache": True,
    "graph_capture": True,
}
FP8: dict[str, Any] = {"kv_dtype": ("auto", "fp8_e4m3"), "kv_scales": ("", "tensor")}
# MI200 has no FP8 arithmetic: its caches are dequantised.
CACHES = ((FP8_INSTINCT, FP8), (("gfx90a",), {"kv_dtype": "auto"}))

PAGED: dict[str, Any] = {
    **SERVING,
    "family": "paged",
    "head_dim": Range(8, 256, multiple_of=8),
    "kv_layout": ("", "NHD", "vectorised"),
    "window": Window(right=False),
    "softcap": True,
    "alibi": True,
    "multimodal": True,
}

POWERS_OF_TWO = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _unified() -> tuple[Row, ...]:
    """AITER's Triton kernel: both phases in one call, sinks, draft trees at page size 1, no LSE. It is always causal,
    so queries without a causal mask are served one at a time (decode) or under the mask of a tree."""
    rows = []
    for archs, cache in CACHES:
        when = {"arch": archs, "kv_dtype": KV_DTYPES}
        base = {**PAGED, **cache, "sinks": True, "batch_invariant": True}
        chain = ({**when, "spec_topk": NO_TREE}, {"page_size": POWERS_OF_TWO})
        one: dict[str, Any] = {"page_size": 1, "spec_topk": ANY_TREE}
        for where, pages in (chain, (when, one)):
            shared = {**base, **pages}
            rows.append(row(when=where, lowered=DEQUANTISE, **shared, s_relation="one", causal=CAUSAL))
            several = {**shared, "s_relation": ("equal", "fewer"), "causal": "bottom_right"}
            rows.append(row(when=where, lowered=DEQUANTISE, **several))
        tree: dict[str, Any] = {"s_relation": ("equal", "one", "fewer"), "causal": CAUSAL, "tree": True}
        rows.append(row(when={**when, "tree": (True,)}, lowered=DEQUANTISE, **base, **one, **tree))
    return tuple(rows)


def _batch_prefill(page: Range) -> tuple[Row, ...]:
    """Composable Kernel's prefill over pages: it returns an LSE, and takes more than one query per sequence."""
    return tuple(
        row(
            when={"arch": archs, "kv_dtype": KV_DTYPES},
            lowered={**DEQUANTISE, **SINKS},
            **PAGED,
            **cache,
            page_size=page,
            lse=True,
            s_relation=("equal", "fewer", "more"),
            causal=CAUSAL,
            spec_topk=NO_TREE,
        )
        for archs, cache in CACHES
    )


# Latent attention wants a multiple of 16 heads per rank. 0.1.20 has FP8, pages, an LSE and unabsorbed prefill.
MLA: dict[str, Any] = {
    **SERVING,
    "family": "mla",
    "s_relation": LENGTHS,
    "causal": CAUSAL,
    "heads": Range(16, 128, multiple_of=16),
    "spec_topk": NO_TREE,
}


def _mla() -> tuple[Row, ...]:
    rows = []
    for archs, cache in CACHES:
        when = {"arch": archs, "kv_dtype": KV_DTYPES}
        base = {**MLA, **cache, "page_size": Range(1)}
        rows.append(row(when=when, lowered=DEQUANTISE, **base, dims=(ABSORBED,), lse=True))
        rows.append(row(when=when, lowered=DEQUANTISE, **{**base, "phase": ("prefill", "extend")}, dims=(UNABSORBED,)))
    return tuple(rows)


MLA_0_1_7 = row(when=WHEN, lowered=DEQUANTISE, **MLA, dims=(ABSORBED,), page_size=1, kv_dtype="auto")

AITER_BACKEND = BackendInfo(
    "aiter",
    "rocm",
    (
        Provider(
            "amd-aiter",
            (
                *AITER_SINKS,
                *AITER_DENSE,
                *_unified(),
                *_batch_prefill(Range(1)),
                *_mla(),
            ),
            requires=(AITER_0_1_20,),
        ),
        Provider(
            "amd-aiter-0.1.7",
            (*AITER_DENSE, *_unified(), *_batch_prefill(Range(1, 1)), MLA_0_1_7),
            requires=(AITER,),
        ),
    ),
    summary="AMD's AITER kernels",
    priority=85,
    auto=(
        AutoRule(100, "ROCm: aiter", conditions(family="paged")),
        AutoRule(200, "MLA on ROCm with 16 or 128 heads: aiter", conditions(family="mla", heads=(16, 128))),
    ),
    upstream="https://github.com/ROCm/aiter",
    note="kernels compile at their first call, for minutes; 0.1.7 and 0.1.20 differ in what they take",
)

WAVE = BackendInfo(
    "wave",
    "rocm",
    (
        Provider(
            "wave-lang",
            (
                row(
                    when=WHEN,
                    lowered=DEQUANTISE,
                    family="paged",
                    dtype=HALF,
                    head_dim=(64, 128),
                    page_size=Range(1),
                    kv_dtype="auto",
                    phase=("prefill", "extend", "decode"),
                    s_relation=("equal", "one", "fewer"),
                    causal=CAUSAL,
                    group=True,
                    scale=True,
                    softcap=True,
                    save_kv_cache=True,
                ),
            ),
            requires=(Requirement("wave-lang", module="wave_lang", hint="pip install wave-lang"),),
        ),
    ),
    summary="Wave kernels on paged caches",
    priority=15,
    upstream="https://github.com/iree-org/wave",
)

BACKENDS = (AITER_BACKEND, WAVE)
