"""The plugin of Moore Threads GPUs: `fa`, `fa3` and `sage_attn`, all from MATE.

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
    Provider,
    Range,
    Requirement,
    Row,
    Window,
    conditions,
    row,
)

__all__ = ["BACKENDS", "polyattn_register_backends"]

POLYATTN_API_VERSION = 1

MATE = Requirement(
    "mate",
    module="mate.mha_interface",
    hint="build https://github.com/MooreThreads/mate (needs MUSA 4.3.6 and torch_musa 2.7); it is not on PyPI",
    impostor="mate, a library of matchers for unittest",
)
UPSTREAM = "https://github.com/MooreThreads/mate"

HALF = ("bfloat16", "float16")
LENGTHS = ("equal", "one", "fewer", "more")
# MP31 and, where nothing is known about the device, benefit of the doubt.
ARCHS = ("", "mp31")

# Exact rewrites. A cache dtype that a kernel cannot read is dequantised by pages; KV_DTYPES is what that knows.
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8")
DEQUANTISE = {"kv_dtype": "dequantise_kv", "kv_scales": "dequantise_kv"}
# MATE takes sinks under a finite window only and folds them into its LSE: they are always applied from the LSE.
SINKS = {"sinks": "sinks_from_lse"}
TREE = {"tree": "tree_by_lse"}

FLASH: dict[str, Any] = {
    "dtype": HALF,
    "s_relation": LENGTHS,
    "causal": ("none", "bottom_right"),
    "group": True,
    "scale": True,
    "window": Window(),
    "softcap": True,
    "cross": True,
    "multimodal": True,
    "deterministic": True,
    "lse": True,
}
WIDTHS = ({"head_dim": Range(8, 512, multiple_of=8)}, {"dims": ((192, 128),)})
PLAIN = {k: v for k, v in FLASH.items() if k not in ("window", "softcap")}


def _dense(width: dict[str, Any]) -> tuple[Row, ...]:
    """Training needs packed batches and neither window nor softcap."""
    when = {"arch": ARCHS}
    return (
        row(when=when, lowered=SINKS, **FLASH, **width, family=("dense", "varlen")),
        row(when=when, lowered=SINKS, **PLAIN, **width, family="varlen", grad=("query", "key", "value")),
    )


FA = BackendInfo(
    "fa",
    "musa",
    (Provider("fa3/mate", tuple(r for width in WIDTHS for r in _dense(width)), requires=(MATE,)),),
    summary="MATE's FlashAttention on dense and packed batches",
    priority=60,
    aliases=(Alias("fa3", ("dense", "varlen"), provider="fa3"),),
    fallbacks=(Fallback("torch_sdpa", "FlashAttention is not installed or the call is outside its limits"),),
    auto=(AutoRule(300, "MUSA: FlashAttention when it serves the call", conditions(family=("dense", "varlen"))),),
    upstream=UPSTREAM,
)

SERVING: dict[str, Any] = {
    **PLAIN,
    "phase": ("prefill", "extend", "decode", "verify"),
    "kv_dtype": "auto",
    "save_kv_cache": True,
    "graph_capture": True,
}
WHEN = {"arch": ARCHS, "kv_dtype": KV_DTYPES}


def _paged(width: dict[str, Any]) -> tuple[Row, ...]:
    lowered = {**DEQUANTISE, **SINKS}
    return (
        row(
            when={**WHEN, "spec_topk": Range(0, 1)},
            lowered=lowered,
            **SERVING,
            **width,
            family="paged",
            page_size=Range(1),
            window=Window(),
            softcap=True,
        ),
        row(
            when=WHEN,
            lowered={**lowered, **TREE},
            **SERVING,
            **width,
            family="paged",
            softcap=True,
            page_size=Range(1),
            spec_topk=Range(0),
        ),
    )


FA3 = BackendInfo(
    "fa3",
    "musa",
    (
        Provider(
            "mate",
            (
                *(r for width in WIDTHS for r in _paged(width)),
                row(
                    when=WHEN,
                    lowered=DEQUANTISE,
                    **SERVING,
                    page_size=Range(1),
                    spec_topk=Range(0, 1),
                    family="mla",
                    dims=((576, 512), (192, 128)),
                    chunked_prefix=True,
                ),
            ),
            requires=(MATE,),
        ),
    ),
    summary="MATE's FlashAttention 3 on paged and latent caches",
    priority=80,
    upstream=UPSTREAM,
)

SAGE_ATTN = BackendInfo(
    "sage_attn",
    "musa",
    (
        Provider(
            "mate",
            (
                row(
                    when={"arch": ARCHS},
                    family="dense",
                    dtype=HALF,
                    head_dim=(64, 128),
                    s_relation="equal",
                    causal=("none", "bottom_right"),
                    group=True,
                    scale=True,
                ),
            ),
            requires=(MATE,),
        ),
    ),
    summary="MATE's SageAttention: quantised scores",
    priority=None,
    fallbacks=(Fallback("fa", "SageAttention is not installed or the call is outside its limits"),),
    lossy="quantised QK and PV: cosine at least 0.998",
    upstream=UPSTREAM,
)

BACKENDS: tuple[BackendInfo, ...] = (FA, FA3, SAGE_ATTN)


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """Every MUSA backend polyattn knows."""
    return BACKENDS
