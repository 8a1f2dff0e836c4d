"""`ascend` on NPUs: npu_fused_infer_attention_score_v2 on paged and latent caches."""

from __future__ import annotations

from typing import Any

from polyattn.contract import AutoRule, BackendInfo, Provider, Range, Row, Window, conditions, row

from .common import HALF, TORCH_NPU, UPSTREAM, Since910B

PAGE = 128
"""Tokens of a page: the one size that every phase and layout of the operator takes."""

# A cache dtype that the operator cannot read is dequantised by pages; these are what that knows.
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8")
LATENT_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
DEQUANTISE = {"kv_dtype": "dequantise_kv", "kv_scales": "dequantise_kv"}

SERVING: dict[str, Any] = {
    "arch": Since910B(),
    "dtype": HALF,
    "page_size": PAGE,
    "kv_dtype": "auto",
    "phase": ("prefill", "extend", "decode", "verify"),
    "s_relation": ("equal", "one", "fewer", "more"),
    "causal": ("none", "bottom_right"),
    "scale": True,
    "spec_topk": Range(0, 1),
    "deterministic": True,
    "misaligned": True,
    "zero_size": True,
}
PAGED: dict[str, Any] = {
    **SERVING,
    "family": "paged",
    "heads": Range(1, 256),
    "group": Range(1, 64),
    "save_kv_cache": True,
    "sinks": True,
    "lse": True,
    "cross": True,
    "multimodal": True,
}
TOKENS_FIRST = ("", "NHD")

SAME: dict[str, Any] = {"same_dims": True}
NARROW: dict[str, Any] = {**SAME, "head_dim": Range(None, 255)}
WIDE: dict[str, Any] = {**SAME, "head_dim": Range(256)}
OTHER: dict[str, Any] = {"dims": ((192, 128),)}
STEPS_OF_256 = Range(256, 512, multiple_of=16)


def _paged(when: dict[str, Any], **limits: Any) -> Row:
    return row(when={"kv_dtype": KV_DTYPES, **when}, lowered=DEQUANTISE, **{**PAGED, **limits})


ROWS = (
    # K and V of two widths: packed queries only, whose windows mean nothing to a single query; heads first with GQA.
    _paged({**OTHER, "kv_layout": TOKENS_FIRST}),
    _paged({**OTHER, "kv_layout": "HND"}, group=Range(2, 64)),
    _paged(NARROW, kv_layout=(*TOKENS_FIRST, "HND"), head_dim=Range(16, 240, multiple_of=16), window=Window()),
    # Pages with their tokens first are read as rows of at most 65,535 numbers.
    _paged({**WIDE, "kv_layout": TOKENS_FIRST}, kv_heads=Range(1, 127), head_dim=STEPS_OF_256, window=Window()),
    _paged({**WIDE, "kv_layout": "HND"}, head_dim=STEPS_OF_256, window=Window()),
    # Latent and rope parts apart: no LSE is documented for them, and heads are a power of two.
    row(
        when={"kv_dtype": LATENT_DTYPES},
        lowered=DEQUANTISE,
        **SERVING,
        family="mla",
        dims=((576, 512),),
        heads=(1, 2, 4, 8, 16, 32, 64, 128),
        group=True,
    ),
)

ASCEND = BackendInfo(
    "ascend",
    "npu",
    (Provider("torch-npu", ROWS, "polyattn_ascend.inference:FusedInference", (TORCH_NPU,)),),
    summary="torch_npu's fused attention on paged and latent caches",
    priority=80,
    auto=(
        AutoRule(100, "NPU: ascend", conditions(family="paged")),
        AutoRule(200, "MLA on NPU: ascend", conditions(family="mla")),
    ),
    evidence="emulator",
    upstream=UPSTREAM,
    note="pages of 128; lengths are the host's, so steps are planned and not recorded into graphs; latent pages are "
    "copied, because the operator wants their two parts apart; sinks are applied from the LSE",
)

BACKENDS = (ASCEND,)
