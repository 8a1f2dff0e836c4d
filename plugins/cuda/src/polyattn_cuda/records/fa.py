"""FlashAttention on dense and packed batches: `fa`, whichever generation is installed and serves the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyattn.records import (
    Alias,
    AutoRule,
    BackendInfo,
    Fallback,
    Provider,
    Range,
    Row,
    Window,
    conditions,
    row,
)

from .common import (
    AMPERE_AND_LATER,
    BLACKWELL,
    CAUSAL,
    CUDA_12_3,
    FA4_BLACKWELL_WIDTHS,
    FA_WIDTHS,
    FLASH_ATTENTION,
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    FLASH_ATTN_4,
    HALF,
    HOPPER,
    LENGTHS,
    SGL_KERNEL,
    SINKS,
    TRAINABLE,
    VLLM,
    WIDE,
)


def _dense(when: Mapping[str, Any], **limits: Any) -> Row:
    """A dense and varlen row; every generation takes these options."""
    return row(
        when=when,
        lowered={} if "sinks" in limits else SINKS,
        family=("dense", "varlen"),
        dtype=HALF,
        s_relation=LENGTHS,
        causal=CAUSAL,
        group=True,
        scale=True,
        window=Window(),
        softcap=True,
        cross=True,
        multimodal=True,
        deterministic=True,
        graph_capture=True,
        **limits,
    )


def _fa3_dense(*, trains: bool, sinks: bool) -> tuple[Row, ...]:
    when = {"arch": HOPPER, "toolkit": CUDA_12_3}
    grad = TRAINABLE if trains else ()
    rows = []
    for width in FA_WIDTHS:
        if sinks:
            rows.append(_dense(when, **width, sinks=True))
        rows.append(_dense(when, **width, lse=True, grad=grad))
    return tuple(rows)


def _fa4_dense(archs: tuple[str, ...], width: Mapping[str, Any], *, trains: bool) -> tuple[Row, ...]:
    when = {"arch": archs}
    grad = TRAINABLE if trains else ()
    return (
        _dense(when, **width, sinks=True),
        _dense(when, **width, lse=True, grad=grad),
    )


FA = BackendInfo(
    "fa",
    "cuda",
    (
        Provider("fa3/flash-attn-3", _fa3_dense(trains=True, sinks=False), requires=(FLASH_ATTN_3,)),
        Provider("fa3/sgl-kernel", _fa3_dense(trains=False, sinks=True), requires=(SGL_KERNEL,)),
        Provider("fa3/vllm", _fa3_dense(trains=False, sinks=True), requires=(VLLM,)),
        Provider(
            "fa4/flash-attn-4",
            (
                *(r for w in FA_WIDTHS for r in _fa4_dense(HOPPER, w, trains=True)),
                *(r for w in FA4_BLACKWELL_WIDTHS for r in _fa4_dense(BLACKWELL, w, trains=True)),
                *_fa4_dense(("sm80", "sm120"), {"head_dim": Range(8, 128, multiple_of=8)}, trains=False),
            ),
            requires=(FLASH_ATTN_4,),
        ),
        Provider(
            "fa2/flash-attn",
            (
                _dense(
                    {"arch": AMPERE_AND_LATER},
                    **WIDE,
                    alibi=True,
                    dropout=True,
                    lse=True,
                    grad=TRAINABLE,
                ),
            ),
            requires=(FLASH_ATTN_2,),
        ),
    ),
    summary="FlashAttention, the newest generation installed that serves the call",
    priority=60,
    aliases=(
        Alias("fa2", ("dense", "varlen"), provider="fa2"),
        Alias("fa3", ("dense", "varlen"), provider="fa3"),
        Alias("fa4", ("dense", "varlen"), provider="fa4"),
    ),
    fallbacks=(Fallback("torch_sdpa", "FlashAttention is not installed or the call is outside its limits"),),
    auto=(AutoRule(300, "CUDA: FlashAttention when it serves the call", conditions(family=("dense", "varlen"))),),
    upstream=FLASH_ATTENTION,
)

BACKENDS = (FA,)
