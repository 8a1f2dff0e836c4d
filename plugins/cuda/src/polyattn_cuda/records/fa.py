"""FlashAttention on dense and packed batches: `fa`, whichever generation is installed and serves the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyattn.contract import (
    Alias,
    AutoRule,
    BackendInfo,
    Fallback,
    OneOf,
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
    FA2_WINDOWS,
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
    SINK_HEADS,
    SINKS,
    TRAINABLE,
    TRAINABLE_LSE,
    VLLM,
    WIDE,
)
from .defects import FA3_DETERMINISTIC, FA3_WINDOWS, SGL_FA3_WINDOWS, VLLM_FA3_DENSE

FA2 = "polyattn_cuda.flash_attention.fa2:FlashAttention2"
FA3 = "polyattn_cuda.flash_attention.fa3:FlashAttention3"
FA4 = "polyattn_cuda.flash_attention.fa4:FlashAttention4"


def _dense(when: Mapping[str, Any], **limits: Any) -> Row:
    """A dense and varlen row; every generation takes these options."""
    options = {
        "family": ("dense", "varlen"),
        "dtype": HALF,
        "s_relation": LENGTHS,
        "causal": CAUSAL,
        "group": True,
        "scale": True,
        "window": Window(),
        "softcap": True,
        "cross": True,
        "multimodal": True,
        "deterministic": True,
        "graph_capture": True,
    }
    return row(when=when, lowered={} if "sinks" in limits else SINKS, **{**options, **limits})


def _fa3_dense(*, trains: bool = False, sinks: tuple[dict[str, Any], ...] = ()) -> tuple[Row, ...]:
    """Rows of one FA3 build. `sinks`: the widths at which it takes them."""
    when = {"arch": HOPPER, "toolkit": CUDA_12_3}
    rows = []
    for width in FA_WIDTHS:
        if width in sinks:
            rows.append(_dense(when, **width, sinks=True, heads=SINK_HEADS))
        rows.append(_dense(when, **width, lse=True))
        if trains:
            rows.append(_dense(when, **width, lse=True, grad=TRAINABLE_LSE, deterministic=False))
    return tuple(rows)


def _fa4_dense(archs: tuple[str, ...], width: Mapping[str, Any]) -> tuple[Row, ...]:
    when = {"arch": archs}
    return (_dense(when, **width, sinks=True), _dense(when, **width, lse=True))


def _fa4_training(archs: tuple[str, ...], limits: Mapping[str, Any]) -> Row:
    return _dense({"arch": archs}, **{"lse": True, "grad": TRAINABLE_LSE, **limits})


# Up to 128 its Hopper backward keeps dQ in rows of D rounded up to 16, and reads them rounded up to 32. It adds up the
# gradients of a group's keys only where K and V have one width ("GQA backward requires head_dim == head_dim_v").
FA4_HOPPER_TRAINING: tuple[dict[str, Any], ...] = (
    {"head_dim": OneOf((24, 32, 56, 64, 88, 96, 120, 128))},
    {"head_dim": Range(136, 256, multiple_of=8)},
    {"dims": ((192, 128),), "group": 1},
)
# To keys that no query sees its Blackwell backward writes zeros in rows of D rounded up to 32, which may be the next
# head's or the next token's (flash_bwd_sm100.py, should_zero_dKV): only packed batches and windows have such tiles.
# At 256 it has neither windows nor softcap (sm100_hd256_2cta_fmha_backward.py).
FA4_BLACKWELL_TRAINING: tuple[dict[str, Any], ...] = (
    {"head_dim": (32, 64, 96, 128)},
    {"head_dim": Range(8, 128, multiple_of=8), "family": "dense", "window": False},
    {"dims": ((192, 128),)},
    {"dims": ((256, 256),), "window": False, "softcap": False},
)

FA4_ROWS = (
    *(r for w in FA_WIDTHS for r in _fa4_dense(HOPPER, w)),
    *(_fa4_training(HOPPER, w) for w in FA4_HOPPER_TRAINING),
    *(r for w in FA4_BLACKWELL_WIDTHS for r in _fa4_dense(BLACKWELL, w)),
    *(_fa4_training(BLACKWELL, w) for w in FA4_BLACKWELL_TRAINING),
    # "Learnable sink is not supported in this kernel" (flash_fwd.py): its sinks are made from the LSE.
    _dense({"arch": ("sm80", "sm120")}, head_dim=Range(8, 128, multiple_of=8), lse=True),
)

# Dropout excludes softcap; its random state is the library's, so that neither LSE nor sinks go with it.
FA2_DROPOUT: dict[str, Any] = {
    "head_dim": Range(8, 192, multiple_of=8),
    "dropout": True,
    "grad": TRAINABLE,
    "softcap": False,
    "deterministic": False,
}
FA2_ROWS = tuple(
    _dense({"arch": AMPERE_AND_LATER}, **limits, **windows)
    for limits in ({**WIDE, "lse": True, "grad": TRAINABLE_LSE}, FA2_DROPOUT)
    for windows in FA2_WINDOWS
)


FA = BackendInfo(
    "fa",
    "cuda",
    (
        Provider(
            "fa3/flash-attn-3",
            _fa3_dense(trains=True),
            FA3,
            (FLASH_ATTN_3,),
            defects=(*FA3_WINDOWS, FA3_DETERMINISTIC),
        ),
        Provider(
            "fa3/sgl-kernel", _fa3_dense(sinks=FA_WIDTHS), f"{FA3}SglKernel", (SGL_KERNEL,), defects=SGL_FA3_WINDOWS
        ),
        Provider("fa3/vllm", _fa3_dense(sinks=(WIDE,)), f"{FA3}VLLM", (VLLM,), defects=VLLM_FA3_DENSE),
        Provider("fa4/flash-attn-4", FA4_ROWS, FA4, (FLASH_ATTN_4,)),
        Provider("fa2/flash-attn", FA2_ROWS, FA2, (FLASH_ATTN_2,)),
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
    evidence="emulator",
    upstream=FLASH_ATTENTION,
)


def _fa4_blocks(archs: tuple[str, ...], block_q: int) -> Row:
    """A tile of keys is a block; on Blackwell two tiles of queries are one."""
    return row(
        when={"arch": archs},
        family="block_sparse",
        dtype=HALF,
        head_dim=(64, 128),
        s_relation=LENGTHS,
        group=True,
        scale=True,
        block_map=(True,),
        block_shape=((block_q, 128),),
        misaligned=True,
        lse=True,
    )


FA4_BLOCKS = BackendInfo(
    "fa4_block_sparse",
    "cuda",
    (
        Provider(
            "flash-attn-4",
            (_fa4_blocks(HOPPER, 128), _fa4_blocks(BLACKWELL, 256)),
            "polyattn_cuda.flash_attention.fa4_blocks:BlockSparse",
            (FLASH_ATTN_4,),
        ),
    ),
    summary="FlashAttention 4 over lists of key blocks, forward only",
    priority=None,
    evidence="emulator",
    compiles=True,
    upstream=FLASH_ATTENTION,
    note="blocks are its tiles: 128 keys, and 128 queries on Hopper or 256 on Blackwell",
)

BACKENDS = (FA, FA4_BLOCKS)
