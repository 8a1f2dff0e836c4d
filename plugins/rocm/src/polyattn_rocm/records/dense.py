"""Dense and packed batches: `fa`, `aiter_sage`, and the dense half of `aiter`.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.records import Alias, AutoRule, BackendInfo, Fallback, Provider, Range, Row, Window, conditions, row

from .common import (
    AITER,
    AITER_0_1_20,
    CAUSAL,
    FLASH_ATTN,
    FP8_INSTINCT,
    HALF,
    INSTINCT,
    LENGTHS,
    SINKS,
    TRAINABLE,
)

WIDTHS = ({"head_dim": Range(8, 256, multiple_of=8)}, {"dims": ((192, 128),)})
COMMON: dict[str, Any] = {
    "when": {"arch": INSTINCT},
    "dtype": HALF,
    "s_relation": LENGTHS,
    "causal": CAUSAL,
    "group": True,
    "scale": True,
    "window": Window(),
    "alibi": True,
    "dropout": True,
    "deterministic": True,
    "cross": True,
    "multimodal": True,
    "graph_capture": True,
    "lse": True,
    "grad": TRAINABLE,
}

# Composable Kernel and assembly MHA. Softcap exists for packed batches only.
AITER_DENSE: tuple[Row, ...] = tuple(
    row(**COMMON, **width, **family, lowered=SINKS)
    for width in WIDTHS
    for family in ({"family": "dense"}, {"family": "varlen", "softcap": True})
)
# From 0.1.20 the kernels take sinks; asked for an LSE as well, the sinks come from it, as in older versions.
AITER_SINKS: tuple[Row, ...] = tuple(
    row(**{**COMMON, **width, "family": ("dense", "varlen"), "lse": False, "grad": ()}, sinks=True) for width in WIDTHS
)

FA = BackendInfo(
    "fa",
    "rocm",
    (
        Provider("aiter", AITER_DENSE, requires=(AITER,)),
        Provider(
            "fa2/flash-attn",
            (
                row(
                    **{**COMMON, "head_dim": Range(8, 256, multiple_of=8), "family": ("dense", "varlen")},
                    softcap=True,
                    lowered=SINKS,
                ),
            ),
            requires=(FLASH_ATTN,),
        ),
    ),
    summary="FlashAttention on ROCm: AITER, or flash-attn 2",
    priority=60,
    aliases=(Alias("fa2", ("dense", "varlen"), provider="fa2"),),
    fallbacks=(Fallback("torch_sdpa", "FlashAttention is not installed or the call is outside its limits"),),
    auto=(AutoRule(300, "ROCm: FlashAttention when it serves the call", conditions(family=("dense", "varlen"))),),
    upstream="https://github.com/ROCm/aiter",
    note="fa3 and fa4 are no aliases here: they would have to become FlashAttention 2",
)

AITER_SAGE = BackendInfo(
    "aiter_sage",
    "rocm",
    (
        Provider(
            "amd-aiter",
            (
                row(
                    when={"arch": FP8_INSTINCT},
                    family="dense",
                    dtype=HALF,
                    head_dim=128,
                    s_relation="equal",
                    causal=CAUSAL,
                    group=True,
                    scale=True,
                ),
            ),
            requires=(AITER_0_1_20,),
        ),
    ),
    summary="AITER's SageAttention: INT8 scores",
    priority=None,
    lossy="INT8 QK, FP8 PV: cosine at least 0.998",
    upstream="https://github.com/ROCm/aiter",
    note="the kernel returns float32, the result is cast to the dtype of q",
)

BACKENDS = (FA, AITER_SAGE)
