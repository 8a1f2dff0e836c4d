"""FlashAttention in serving: `fa2`, `fa3` and `fa4` on paged and latent caches.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyattn.contract import (
    Accuracy,
    AutoRule,
    BackendInfo,
    Fallback,
    PairRule,
    Provider,
    Range,
    Row,
    Window,
    conditions,
    row,
)

from .common import (
    ABSORBED,
    AMPERE_AND_LATER,
    ANY_PAGE,
    ANY_TREE,
    BLACKWELL,
    BY_TOKENS,
    CUDA_12_3,
    DEQUANTISE,
    FA4_BLACKWELL_WIDTHS,
    FA_WIDTHS,
    FLASH_ATTENTION,
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    FLASH_ATTN_4,
    HOPPER,
    KV_DTYPES,
    LATENT_DTYPES,
    NO_TREE,
    SERVING,
    SGL_KERNEL,
    SINK_HEADS,
    SINKS,
    TREE,
    UNABSORBED,
    VLLM,
    WIDE,
    free_slots,
)
from .defects import (
    FA2_PAGED_LSE,
    FA3_WINDOWS,
    FA4_PAGED_WIDTHS,
    SGL_CHUNKS,
    SGL_FA3_WINDOWS,
    VLLM_FA3_FP8,
    VLLM_FA3_PAGED,
)
from .flashinfer import LATENT_HEADS

FA3_TARGET = "polyattn_cuda.flash_attention.fa3:FlashAttention3"

STRIDED = ("", "NHD", "HND")
"""Layouts of a cache that are views of each other: FA2 and FA3 take any strides."""

# FA3: fp16/bf16, head dims to 256, any page size, no dropout, ALiBi or masks. It reads e4m3 caches with queries in e4m3
# only, which is not what a caller with bf16 queries asked for: such caches are dequantised by pages.
FA3_SERVING: dict[str, Any] = {
    **SERVING,
    "kv_dtype": "auto",
    "softcap": True,
    "cross": True,
    "deterministic": True,
    "batch_invariant": True,
    "graph_capture": True,
    "zero_size": True,
    "misaligned": True,
}


WINDOWED: dict[str, Any] = {"window": Window()}
CHUNKED_TOO: dict[str, Any] = {**WINDOWED, "chunk": True}
# A chunk and a shorter window go together on one build alone: `defects.SGL_CHUNKS`.
CHUNKED_OR = (WINDOWED, {"chunk": True})


def _fa3_paged(
    archs: tuple[str, ...],
    *,
    page: Range = ANY_PAGE,
    widths: tuple[dict[str, Any], ...] = FA_WIDTHS,
    bands: tuple[dict[str, Any], ...] = (WINDOWED,),
    sinks: tuple[dict[str, Any], ...] = (),
) -> tuple[Row, ...]:
    """Paged rows of one FA3 build.

    Args:
        archs: what it was compiled for. page: the sizes it takes. widths: those of the keys and values that it takes.
        bands: its windows and chunks.
        sinks: the widths at which it takes them; its LSE then includes them, so a call that wants the LSE as well gets
            its sinks by the lowering.
    """
    when = {"arch": archs, "toolkit": CUDA_12_3, "kv_dtype": KV_DTYPES}
    base = {
        **FA3_SERVING,
        "family": "paged",
        "page_size": page,
        "kv_layout": STRIDED,
        "multimodal": True,
    }
    rows = []
    for width in widths:
        chain = {**when, "spec_topk": NO_TREE}
        for band in bands:
            banded = {**base, **width, **band}
            if width in sinks:
                rows.append(row(when=chain, lowered=DEQUANTISE, **banded, sinks=True, heads=SINK_HEADS))
            rows.append(row(when=chain, lowered={**DEQUANTISE, **SINKS}, **banded, lse=True))
        # A draft tree is attended as prefix plus drafts, merged by LSE; upstream has no window there.
        tree = {**base, **width, "lse": True, "spec_topk": ANY_TREE}
        rows.append(row(when=when, lowered={**DEQUANTISE, **SINKS, **TREE}, **tree))
    return tuple(rows)


def _fa3_mla(page: Range = ANY_PAGE) -> tuple[Row, ...]:
    """MLA rows: the latent goes in as `qv`. Draft trees only at page size 1."""
    when = {"arch": HOPPER, "toolkit": CUDA_12_3, "kv_dtype": LATENT_DTYPES}
    base = {
        **FA3_SERVING,
        "family": "mla",
        "dims": (ABSORBED, UNABSORBED),
        "lse": True,
        "chunked_prefix": True,
    }
    chain = row(when={**when, "spec_topk": NO_TREE}, lowered=DEQUANTISE, **base, page_size=page)
    tree = row(when=when, lowered={**DEQUANTISE, **TREE}, **base, page_size=1, spec_topk=ANY_TREE)
    return (chain, tree) if page.low == 1 else (chain,)


VLLM_PAGE = Range(16, multiple_of=16)

FA3 = BackendInfo(
    "fa3",
    "cuda",
    (
        Provider(
            "flash-attn-3",
            (*_fa3_paged(HOPPER, bands=(CHUNKED_TOO,)), *_fa3_mla()),
            FA3_TARGET,
            (FLASH_ATTN_3,),
            defects=FA3_WINDOWS,
        ),
        Provider(
            "sgl-kernel",
            (
                *_fa3_paged(HOPPER, bands=CHUNKED_OR, sinks=FA_WIDTHS),
                # "Only Hopper supports different V headdim" (flash_api.cpp), and its kernel before Hopper is given
                # sinks that it never reads (flash_fwd_kernel_sm80.h): here they are made from the LSE.
                *_fa3_paged(("sm80", "sm86", "sm89"), widths=(WIDE,), bands=CHUNKED_OR),
                *_fa3_mla(),
            ),
            f"{FA3_TARGET}SglKernel",
            (SGL_KERNEL,),
            defects=(*SGL_FA3_WINDOWS, SGL_CHUNKS),
        ),
        Provider(
            "vllm",
            (*_fa3_paged(HOPPER, page=VLLM_PAGE, sinks=(WIDE,)), *_fa3_mla(VLLM_PAGE)),
            f"{FA3_TARGET}VLLM",
            (VLLM,),
            defects=VLLM_FA3_PAGED,
        ),
    ),
    summary="FlashAttention 3, serving",
    priority=90,
    auto=(
        AutoRule(
            100,
            "Hopper with CUDA 12.3 or newer, no draft tree, a cache in the query's dtype: fa3",
            conditions(family="paged", arch=HOPPER, toolkit=CUDA_12_3, spec_topk=NO_TREE, kv_dtype="auto"),
        ),
        AutoRule(
            200,
            "MLA on Hopper with CUDA 12.3 or newer: fa3",
            conditions(family="mla", arch=HOPPER, toolkit=CUDA_12_3),
        ),
    ),
    fallbacks=(
        Fallback(
            "fa3_fp8",
            "its kernel reads e4m3 caches where they lie, queries and attention weights rounded to e4m3 too (relative "
            "error about 0.03); fa3 itself turns the pages of each call into the queries' dtype first",
            conditions(family="paged", kv_dtype="fp8_e4m3"),
            first=True,
        ),
    ),
    upstream=f"{FLASH_ATTENTION}/tree/main/hopper",
    evidence="emulator",
    note="e4m3 caches are read by fa3_fp8 unless mode is strict; other cache dtypes than the query's are dequantised "
    "by pages",
)


def _fa3_fp8(page: Range = ANY_PAGE) -> tuple[Row, ...]:
    return (
        row(
            when={"arch": HOPPER, "toolkit": CUDA_12_3},
            lowered=SINKS,
            **{**FA3_SERVING, "kv_dtype": "fp8_e4m3", "batch_invariant": False},
            family="paged",
            head_dim=Range(64, 256, multiple_of=16),
            page_size=page,
            kv_layout=STRIDED,
            kv_scales=("", "tensor", "head"),
            window=Window(),
            lse=True,
            multimodal=True,
            spec_topk=NO_TREE,
        ),
    )


FA3_FP8_TARGET = "polyattn_cuda.flash_attention.fa3_fp8:FlashAttention3FP8"
FA3_FP8_CLASS = Accuracy(0.998, 0.06)

FA3_FP8 = BackendInfo(
    "fa3_fp8",
    "cuda",
    (
        Provider("flash-attn-3", _fa3_fp8(), FA3_FP8_TARGET, (FLASH_ATTN_3,), FA3_FP8_CLASS),
        Provider("sgl-kernel", _fa3_fp8(), f"{FA3_FP8_TARGET}SglKernel", (SGL_KERNEL,), FA3_FP8_CLASS),
        Provider("vllm", _fa3_fp8(VLLM_PAGE), f"{FA3_FP8_TARGET}VLLM", (VLLM,), FA3_FP8_CLASS, VLLM_FA3_FP8),
    ),
    summary="FlashAttention 3 over e4m3 caches, queries and weights rounded to e4m3 too",
    priority=None,
    evidence="emulator",
    lossy="queries and attention weights in e4m3: relative error about 0.03",
    upstream=f"{FLASH_ATTENTION}/tree/main/hopper",
)

# FA4: JIT-compiled; no FP8 cache; its LSE includes the sinks, so a call that wants both gets them by the lowering.
FA4_SERVING: dict[str, Any] = {
    **SERVING,
    "kv_dtype": "auto",
    "deterministic": True,
    "batch_invariant": True,
    "graph_capture": True,
    "zero_size": True,
    "misaligned": True,
}
# "Paged KV does not support irregular head dim", where it is not loaded by TMA. Without TMA 128 threads load, and
# 1024 / gcd(D, D_v, 64) rows at a time must divide a tile of keys, which on Hopper the width and the mask decide: 144
# up to D = 96, 112 up to 192, 80 up to 256 (PagedKVManager.create, select_sm90_tile). Other widths give wrong rows or
# read beyond memory there.
FA4_PAGED_HOPPER: tuple[dict[str, Any], ...] = (
    {"head_dim": (16, 32, 48, 64, 112, 128, 192, 256)},
    {"dims": (UNABSORBED,)},
)
FA4_PAGED_BLACKWELL: tuple[dict[str, Any], ...] = (
    {"head_dim": Range(16, 128, multiple_of=16)},
    *FA4_BLACKWELL_WIDTHS[1:-1],
    # Of 256 one or two processors share a tile, by how much there is to do, and they round exponentials differently.
    {**FA4_BLACKWELL_WIDTHS[-1], "batch_invariant": False},
)


def _fa4_paged(
    archs: tuple[str, ...], width: Mapping[str, Any], page: Range | int, spec_topk: Range
) -> tuple[Row, ...]:
    """Rows of one head width. `spec_topk` is a condition: what serves trees is another row, with other pages."""
    when = {"arch": archs, "kv_dtype": KV_DTYPES, "spec_topk": spec_topk}
    base = {
        **FA4_SERVING,
        **width,
        "family": "paged",
        "page_size": page,
        "window": Window(),
        "softcap": True,
        "multimodal": True,
    }
    return (
        row(when=when, lowered=DEQUANTISE, **base, sinks=True),
        row(when=when, lowered={**DEQUANTISE, **SINKS, **TREE}, **base, lse=True),
    )


# Two kernels share the absorbed calls: the one of pairs of blocks wants heads that divide its tile of 128 rows
# (flash_fwd_mla_sm100.py), and the other reads other numbers of keys at a time, so that a sequence's sums follow from
# which it is, and that from the batch (_mla_1cta_route).
FA4_ABSORBED: dict[str, Any] = {"dims": (ABSORBED,), "heads": LATENT_HEADS, "batch_invariant": False}


def _fa4_mla(archs: tuple[str, ...], **limits: Any) -> Row:
    return row(
        when={"arch": archs, "kv_dtype": LATENT_DTYPES},
        lowered={**DEQUANTISE, **BY_TOKENS},
        **{**FA4_SERVING, **limits},
        family="mla",
        page_size=1,
        lse=True,
        chunked_prefix=True,
    )


FA4 = BackendInfo(
    "fa4",
    "cuda",
    (
        Provider(
            "flash-attn-4",
            (
                # Hopper takes pages of 128 only; Blackwell is fastest at 128, takes others without TMA, trees at 1.
                *(r for w in FA4_PAGED_HOPPER for r in _fa4_paged(HOPPER, w, 128, NO_TREE)),
                *(r for w in FA4_PAGED_BLACKWELL for r in _fa4_paged(BLACKWELL, w, ANY_PAGE, NO_TREE)),
                *(r for w in FA4_PAGED_BLACKWELL for r in _fa4_paged(BLACKWELL, w, 1, ANY_TREE)),
                _fa4_mla(BLACKWELL, **FA4_ABSORBED),
                _fa4_mla((*HOPPER, *BLACKWELL), dims=(UNABSORBED,)),
            ),
            "polyattn_cuda.flash_attention.fa4:FlashAttention4",
            (FLASH_ATTN_4,),
            defects=(FA4_PAGED_WIDTHS,),
        ),
    ),
    summary="FlashAttention 4 (CuTe DSL), serving",
    priority=88,
    auto=(
        AutoRule(
            111,
            "Blackwell with K and V of different widths, no draft tree: fa4",
            conditions(family="paged", arch=BLACKWELL, same_dims=(False,), spec_topk=NO_TREE),
        ),
    ),
    pairs=(
        PairRule(
            "prefill",
            "decode",
            ("trtllm_mha",),
            "an FP4 cache that fa4 prefilled cannot be decoded by trtllm_mha",
            conditions(kv_dtype="fp4_e2m1"),
        ),
    ),
    evidence="emulator",
    upstream=f"{FLASH_ATTENTION}/tree/main/flash_attn/cute",
    config=(free_slots("pages of 128 are read row by row, not by TMA"),),
    note="the first call compiles; decode on Hopper has no split-KV and slows down with length; pages of 128 are read "
    "row by row unless the option free_slots says finite: TMA would bring free slots, which are multiplied by 0",
    compiles=True,
)

# Of more queries than keys a block may see none under a band; its LSE is written over other memory (see the adapter).
FA2_BANDS: tuple[dict[str, Any], ...] = (
    {"s_relation": ("equal", "one", "fewer"), "window": Window()},
    {"s_relation": "more", "causal": "none"},
)
FA2_SERVING: dict[str, Any] = {
    **SERVING,
    **WIDE,
    "family": "paged",
    "page_size": Range(256, multiple_of=256),
    "kv_dtype": "auto",
    "kv_layout": STRIDED,
    "softcap": True,
    "lse": True,
    "cross": True,
    "multimodal": True,
    "spec_topk": NO_TREE,
    "deterministic": True,
    "graph_capture": True,
    "zero_size": True,
    "misaligned": True,
}

FA2 = BackendInfo(
    "fa2",
    "cuda",
    (
        Provider(
            "flash-attn",
            tuple(
                row(
                    when={"arch": AMPERE_AND_LATER, "kv_dtype": KV_DTYPES},
                    lowered={**DEQUANTISE, **SINKS},
                    **{**FA2_SERVING, **band},
                )
                for band in FA2_BANDS
            ),
            "polyattn_cuda.flash_attention.fa2:FlashAttention2",
            (FLASH_ATTN_2,),
            defects=(FA2_PAGED_LSE,),
        ),
    ),
    summary="FlashAttention 2, serving",
    priority=55,
    evidence="emulator",
    upstream=FLASH_ATTENTION,
)

BACKENDS = (FA3, FA3_FP8, FA4, FA2)
