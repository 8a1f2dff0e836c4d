"""What MATE, Moore Threads' library, takes: `fa`, `fa3` and `sage_attn`.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.contract import (
    Accuracy,
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

__all__ = ["BACKENDS", "MATE", "SAGE"]

MATE = Requirement(
    "mate",
    module="mate.mha_interface",
    hint="build https://github.com/MooreThreads/mate (needs MUSA 4.3.6 and torch_musa 2.7); it is not on PyPI",
    impostor="mate, a library of matchers for unittest",
)
SAGE = Requirement(
    "sageattention",
    module="sageattention.interface",
    hint="build wrappers/SageAttention of https://github.com/MooreThreads/mate; the sageattention of PyPI is for CUDA",
    impostor="SageAttention for CUDA, not MATE's wrapper",
)
FLASH_TARGET = "polyattn_musa.flash:Flash"
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
# The backward is another library's, to 256 wide.
TRAINED_WIDTHS = ({"head_dim": Range(8, 256, multiple_of=8)}, {"dims": ((192, 128),)})
PLAIN = {k: v for k, v in FLASH.items() if k not in ("window", "softcap")}


def _dense(width: dict[str, Any]) -> Row:
    return row(when={"arch": ARCHS}, lowered=SINKS, **FLASH, **width, family=("dense", "varlen"))


def _trained(width: dict[str, Any]) -> tuple[Row, ...]:
    """Packed batches, with neither window nor softcap. Where the backward's causal mask starts for unequal lengths is
    not documented, and neither is what it makes of rows without keys."""
    base = {**PLAIN, **width, "family": "varlen", "grad": ("query", "key", "value")}
    when = {"arch": ARCHS}
    return (
        row(when=when, lowered=SINKS, **{**base, "causal": "none", "s_relation": ("equal", "fewer")}),
        row(when=when, lowered=SINKS, **{**base, "s_relation": "equal"}),
    )


FA = BackendInfo(
    "fa",
    "musa",
    (
        Provider(
            "fa3/mate",
            (*map(_dense, WIDTHS), *(r for width in TRAINED_WIDTHS for r in _trained(width))),
            FLASH_TARGET,
            (MATE,),
        ),
    ),
    summary="MATE's FlashAttention on dense and packed batches",
    priority=60,
    aliases=(Alias("fa3", ("dense", "varlen"), provider="fa3"),),
    fallbacks=(Fallback("torch_sdpa", "FlashAttention is not installed or the call is outside its limits"),),
    evidence="emulator",
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


# The latent kernel has pages of 64; a latent of 128 goes through the paged one, which has any.
LATENT = ({"dims": ((576, 512),), "page_size": (64,)}, {"dims": ((192, 128),), "page_size": Range(1)})

FA3 = BackendInfo(
    "fa3",
    "musa",
    (
        Provider(
            "mate",
            (
                *(r for width in WIDTHS for r in _paged(width)),
                *(
                    row(
                        when=WHEN,
                        lowered=DEQUANTISE,
                        **SERVING,
                        spec_topk=Range(0, 1),
                        family="mla",
                        chunked_prefix=True,
                        **pages,
                    )
                    for pages in LATENT
                ),
            ),
            FLASH_TARGET,
            (MATE,),
        ),
    ),
    summary="MATE's FlashAttention 3 on paged and latent caches",
    priority=80,
    evidence="emulator",
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
                row(
                    when={"arch": ARCHS},
                    family="dense",
                    dtype=HALF,
                    head_dim=(64, 128),
                    s_relation=LENGTHS,
                    cross=True,
                    group=True,
                    scale=True,
                ),
            ),
            "polyattn_musa.sage:Sage",
            (MATE, SAGE),
            Accuracy(0.998, 0.06),
        ),
    ),
    summary="MATE's SageAttention: quantised scores",
    priority=None,
    evidence="emulator",
    fallbacks=(Fallback("fa", "SageAttention is not installed or the call is outside its limits"),),
    lossy="quantised QK and PV: cosine at least 0.998",
    upstream=UPSTREAM,
)

BACKENDS: tuple[BackendInfo, ...] = (FA, FA3, SAGE_ATTN)
