"""Dense and packed batches: `fa`, `aiter_sage`, and the dense half of `aiter`.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.contract import Accuracy, Alias, AutoRule, BackendInfo, Fallback, Provider, Range, Row, conditions, row

from .common import (
    AITER,
    AITER_0_1_20,
    ASSEMBLY_ARCHS,
    CAUSAL,
    CK_ARCHS,
    FLASH_ATTN,
    FLASH_ATTN_TRITON,
    HALF,
    LENGTHS,
    RDNA,
    SINKS,
    TRAINABLE,
    TRAINABLE_LSE,
    WINDOWS,
)

MHA = "polyattn_rocm.aiter.mha:AiterMHA"
ONE_WIDTH: dict[str, Any] = {"head_dim": Range(8, 256, multiple_of=8)}
WIDTHS: tuple[dict[str, Any], ...] = (ONE_WIDTH, {"dims": ((192, 128),)})
COMMON: dict[str, Any] = {
    "when": {"arch": CK_ARCHS},
    "family": ("dense", "varlen"),
    "dtype": HALF,
    "causal": CAUSAL,
    "group": True,
    "scale": True,
    "deterministic": True,
    "cross": True,
    "multimodal": True,
    "graph_capture": True,
}
# The random state of a dropout is the library's, so that neither LSE nor sinks go with it.
DROPOUT: dict[str, Any] = {"dropout": True, "grad": TRAINABLE, "deterministic": False, "graph_capture": False}


def _aiter(*, softcap: bool, sinks: bool) -> tuple[Row, ...]:
    rows = []
    for shape in (width | lengths for width in WIDTHS for lengths in WINDOWS):
        rows.append(row(**COMMON, **shape, lse=True, grad=TRAINABLE_LSE, lowered=SINKS))
        rows.append(row(**{**COMMON, **DROPOUT}, **shape))
        if sinks:
            rows.append(row(**COMMON, **shape, sinks=True))
        if softcap:
            packed = {**COMMON, "family": "varlen", "softcap": True}
            rows.append(row(**packed, **shape, lse=True, lowered=SINKS, note="the packed backward has no softcap"))
    return tuple(rows)


AITER_DENSE = _aiter(softcap=True, sinks=True)
# Its assembly is chosen for a packed batch with a softcap too.
AITER_DENSE_0_1_7 = _aiter(softcap=False, sinks=False)

FLASH_ATTN_COMMON: dict[str, Any] = {**COMMON, **ONE_WIDTH, "when": {"arch": (*CK_ARCHS, *RDNA)}}
FLASH_ATTN_ROWS = tuple(
    r
    for lengths in WINDOWS
    for r in (
        row(
            **FLASH_ATTN_COMMON,
            **lengths,
            lse=True,
            grad=TRAINABLE_LSE,
            lowered=SINKS,
            note="no softcap: Composable Kernel's build takes one and ignores it",
        ),
        row(**{**FLASH_ATTN_COMMON, **DROPOUT}, **lengths),
    )
)


def _flash_attn_triton() -> tuple[Row, ...]:
    """Of both Triton builds. flash-attn's own, to 2.8, drops windows and softcaps and draws one dropout mask for ever.
    To queries before the first key it writes rows as wide as a power of two; in a packed batch, and to sequences of no
    query, LSEs past their ends and those of the tensor."""
    causal: dict[str, Any] = {"family": "dense", "causal": "bottom_right"}
    limits: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"causal": "none"}, {"causal": "none"}),
        ({"causal": "bottom_right", "s_relation": ("equal", "one", "fewer")}, causal),
        ({"causal": "bottom_right", "s_relation": "more"}, {**causal, "head_dim": (16, 32, 64, 128, 256)}),
    )
    statistics: dict[str, Any] = {"lse": True, "grad": TRAINABLE_LSE, "lowered": SINKS}
    common = {**FLASH_ATTN_COMMON, **statistics}
    return tuple(
        row(**{**common, **limit, "s_relation": when.get("s_relation", LENGTHS), "when": {**common["when"], **when}})
        for when, limit in limits
    )


FA = BackendInfo(
    "fa",
    "rocm",
    (
        Provider("aiter", AITER_DENSE, MHA, (AITER_0_1_20,)),
        Provider("aiter-0.1.7", AITER_DENSE_0_1_7, MHA, (AITER,)),
        Provider("fa2/flash-attn", FLASH_ATTN_ROWS, "polyattn_rocm.flash_attention:FlashAttention2", (FLASH_ATTN,)),
        Provider(
            "fa2/flash-attn-triton",
            _flash_attn_triton(),
            "polyattn_rocm.flash_attention:FlashAttention2Triton",
            (FLASH_ATTN_TRITON,),
        ),
    ),
    summary="FlashAttention on ROCm: AITER, or flash-attn 2",
    priority=60,
    aliases=(Alias("fa2", ("dense", "varlen"), provider="fa2"),),
    fallbacks=(Fallback("torch_sdpa", "FlashAttention is not installed or the call is outside its limits"),),
    auto=(AutoRule(300, "ROCm: FlashAttention when it serves the call", conditions(family=("dense", "varlen"))),),
    evidence="emulator",
    upstream="https://github.com/ROCm/aiter",
    note="fa3 and fa4 are no aliases here: they would have to become FlashAttention 2. On RDNA chips flash-attn serves",
)

AITER_SAGE = BackendInfo(
    "aiter_sage",
    "rocm",
    (
        Provider(
            "amd-aiter",
            (
                row(
                    when={"arch": ASSEMBLY_ARCHS},
                    family="dense",
                    dtype=HALF,
                    head_dim=(64, 128),
                    s_relation=("equal", "one", "fewer"),
                    causal=CAUSAL,
                    group=True,
                    scale=True,
                    cross=True,
                    lse=True,
                ),
            ),
            "polyattn_rocm.aiter.sage:AiterSage",
            (AITER_0_1_20,),
            Accuracy(cosine=0.998, error=0.06),
        ),
    ),
    summary="AITER's SageAttention: INT8 scores",
    priority=None,
    evidence="emulator",
    lossy="INT8 QK, FP8 PV: cosine at least 0.998",
    upstream="https://github.com/ROCm/aiter",
    note="the kernel returns bfloat16, whatever it is given; the result is cast to the dtype of q",
)

BACKENDS = (FA, AITER_SAGE)
