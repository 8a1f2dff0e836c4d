"""`fa` on NPUs: npu_fusion_attention on dense and packed batches, with its backward."""

from __future__ import annotations

from typing import Any

from polyattn.contract import AtLeast, AutoRule, BackendInfo, Fallback, Provider, Range, Window, conditions, row

from .common import HALF, TORCH_NPU, TRAINABLE, UPSTREAM, Since910B

FUSION: dict[str, Any] = {
    "arch": Since910B(),
    "dtype": (*HALF, "float32"),
    "heads": Range(1, 256),
    "s_relation": ("equal", "one", "fewer", "more"),
    "group": True,
    "scale": True,
    "cross": True,
    "multimodal": True,
    "misaligned": True,
}
DENSE: dict[str, Any] = {
    "family": "dense",
    "causal": ("none", "bottom_right", "top_left"),
    "window": Window(),
    "mask": ("none", "bool"),
}
# Only one mask for all sequences, so that a band is either the operator's own, at the lower right, or none.
PACKED: tuple[dict[str, Any], ...] = (
    {"family": "varlen", "causal": ("none", "bottom_right"), "window": Window()},
    {"family": "varlen", "causal": ("none", "top_left")},
)
# It wants D_qk >= D_v; other pairs than these are not said to work together with gradients.
WIDTHS: tuple[dict[str, Any], ...] = ({"head_dim": Range(1, 768)}, {"dims": ((192, 128),)})
SINKS = {"sinks": "sinks_from_lse"}
STATISTICS: dict[str, Any] = {"lse": True, "grad": (*TRAINABLE, "lse")}
# Statistics of packed sequences in the order of the output: without it they are heads first.
SOFTMAX_LAYOUT = {"toolkit": AtLeast((8, 3))}

ROWS = tuple(
    r
    for width in WIDTHS
    for r in (
        row(**FUSION, **DENSE, **STATISTICS, **width, lowered=SINKS, note="npu_fusion_attention"),
        *(
            row(
                when=SOFTMAX_LAYOUT,
                lowered=SINKS,
                **FUSION,
                **packed,
                **STATISTICS,
                **width,
                note="npu_fusion_attention with input_layout TND; lengths are read on the host",
            )
            for packed in PACKED
        ),
        # Older: without statistics.
        *(row(**FUSION, **packed, **width) for packed in PACKED),
        # The random state is the operator's own: its autograd, and neither LSE nor sinks.
        *(row(**FUSION, **shape, **width, dropout=True, grad=TRAINABLE) for shape in (DENSE, *PACKED)),
    )
)

FA = BackendInfo(
    "fa",
    "npu",
    (Provider("torch-npu", ROWS, "polyattn_ascend.fusion:FusionAttention", (TORCH_NPU,)),),
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
    evidence="emulator",
    upstream=UPSTREAM,
    note="fa3 and fa4 are no aliases here: there is one fused operator. Additive masks are not taken: its documents "
    "disagree about whether they are scaled",
)

BACKENDS = (FA,)
