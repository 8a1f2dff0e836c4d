"""FlashInfer: its own paged and latent kernels, and the TensorRT-LLM and CuTe DSL kernels that it carries.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.contract import (
    SESSION,
    Accuracy,
    AtLeast,
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

from .common import (
    ABSORBED,
    AMPERE_AND_LATER,
    ANY_PAGE,
    ANY_TREE,
    BLACKWELL,
    CAUSAL,
    DEQUANTISE,
    HALF,
    HOPPER,
    KV_DTYPES,
    LATENT_DTYPES,
    LENGTHS,
    NO_TREE,
    SERVING,
    SINKS,
    UNABSORBED,
)
from .defects import FLASHINFER_PAGED, FLASHINFER_RAGGED

UPSTREAM = "https://github.com/flashinfer-ai/flashinfer"
FLASHINFER = Requirement(
    "flashinfer-python", ">=0.6.18", module="flashinfer", hint="pip install -U flashinfer-python", also=("flashinfer",)
)
FLASHINFER_MLA_LIBRARY = Requirement(
    "flashinfer-python",
    ">=0.7.1",
    module="flashinfer.mla",
    hint="pip install -U flashinfer-python",
    also=("flashinfer",),
)
"""With MLAPlanMetadata, and the base of an LSE as an argument of every kernel."""

FLASHINFER_GDN = Requirement(
    "flashinfer-python",
    ">=0.7.2",
    module="flashinfer.gdn_prefill",
    hint="pip install -U flashinfer-python",
    also=("flashinfer",),
)

SHAPES: dict[str, Any] = {"misaligned": True, "zero_size": True}
LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Those whose rows fill a tile: with others the kernel's causal rule and its planner's differ by a key."""
WIDTHS: tuple[dict[str, Any], ...] = ({"head_dim": (64, 128, 256)}, {"dims": (UNABSORBED,)})


def _wrappers(width: dict[str, Any]) -> tuple[Row, ...]:
    """The plan-and-run wrappers (fa2 and fa3 templates). Their sinks are dropped without a word by these templates, so
    the adapter makes them from the LSE."""
    base: dict[str, Any] = {
        **SERVING,
        **SHAPES,
        **width,
        "when": {"arch": AMPERE_AND_LATER, "kv_dtype": KV_DTYPES},
        "lowered": DEQUANTISE,
        "family": "paged",
        "page_size": ANY_PAGE,
        "kv_layout": ("", "NHD", "HND"),
        "window": Window(right=False),
        "softcap": True,
        "sinks": True,
        "lse": True,
        "cross": True,
        "chunked_prefix": True,
        "deterministic": True,
    }
    stored: dict[str, Any] = {"kv_dtype": ("auto", "fp8_e4m3", "fp8_e5m2"), "kv_scales": ("", "tensor")}
    if "dims" in width:
        # One width of K and V for its FP8 and decode kernels.
        stored = {"kv_dtype": "auto"}
    one: dict[str, Any] = {"phase": "decode", "s_relation": "one"}
    return (
        row(**base, **stored, spec_topk=NO_TREE, graph_capture=SESSION),
        row(**{**base, **stored, **one}, spec_topk=NO_TREE, batch_invariant=True, graph_capture=SESSION),
        row(**base, **stored, mask=("none", "bool"), tree=(True,), spec_topk=ANY_TREE, graph_capture=SESSION),
        # The mask of a step is known to a plan where it is a tree's, and else to the layers only; so are further parts,
        # of which no rewrite of the caches knows.
        row(
            **{**base, **stored, "when": {"arch": AMPERE_AND_LATER}, "lowered": {}},
            mask=("none", "bool"),
            spec_topk=ANY_TREE,
            kv_parts=ANY_TREE,
            note="masks other than trees are not recorded",
        ),
    )


def _ragged(width: dict[str, Any]) -> tuple[Row, ...]:
    """Its prefill kernels over keys that are not in pages. They have no backward."""
    return tuple(
        row(
            when={"arch": AMPERE_AND_LATER},
            **SHAPES,
            **width,
            family=family,
            dtype=HALF,
            s_relation=LENGTHS,
            causal=("none", "bottom_right"),
            window=Window(right=False),
            softcap=True,
            sinks=True,
            lse=True,
            group=True,
            scale=True,
            deterministic=True,
            cross=True,
        )
        for family in ("dense", "varlen")
    )


# Of all of its kernels: float32 states [N, H_v, D_v, D] of heads of 128.
GDN: dict[str, Any] = {
    "family": "linear",
    "method": "gdn",
    "head_dim": 128,
    "state_layout": ("", "VK"),
    "causal": CAUSAL,
    "group": True,
    "scale": True,
    "qk_norm": True,
    "misaligned": True,
}
# Those of single tokens and of drafts write bfloat16.
GDN_RAW: dict[str, Any] = {**GDN, "dtype": "bfloat16", "raw_gates": ("softplus",), "state_slots": True}


def _gdn(when: dict[str, Any]) -> tuple[Row, ...]:
    """Gated delta net. Drafts are verified as a chain; a tree goes to the triton backend."""
    steps: dict[str, Any] = {"phase": ("prefill", "extend", "decode"), "s_relation": ("equal", "one")}
    return (
        row(when=when, **GDN, **steps, dtype=HALF),
        row(when=when, **GDN_RAW, phase="decode", s_relation="one", graph_capture=True),
        row(
            when=when,
            **GDN_RAW,
            phase="verify",
            s_relation=("equal", "fewer"),
            spec_topk=NO_TREE,
            state_out=("every",),
            graph_capture=True,
        ),
    )


FLASHINFER_MHA = BackendInfo(
    "flashinfer",
    "cuda",
    (
        Provider(
            "flashinfer-python",
            tuple(made for width in WIDTHS for made in _wrappers(width)),
            target="polyattn_cuda.flashinfer.paged:Paged",
            requires=(FLASHINFER,),
            defects=FLASHINFER_PAGED,
        ),
        Provider(
            "ragged",
            tuple(made for width in WIDTHS for made in _ragged(width)),
            target="polyattn_cuda.flashinfer.ragged:Ragged",
            requires=(FLASHINFER,),
            defects=FLASHINFER_RAGGED,
        ),
        Provider(
            "gdn",
            (*_gdn({"arch": HOPPER}), *_gdn({"arch": BLACKWELL, "toolkit": AtLeast((13, 0))})),
            target="polyattn_cuda.flashinfer.gdn:GDN",
            requires=(FLASHINFER_GDN,),
        ),
    ),
    summary="FlashInfer on paged caches, and gated delta nets",
    priority=80,
    auto=(
        AutoRule(
            150,
            "CUDA without a rule of its own, FlashInfer installed, no sinks: flashinfer",
            conditions(family="paged", sinks=(False,)),
        ),
    ),
    fallbacks=(
        Fallback("flashinfer_mla", "FlashInfer's kernels of latent caches have this name", conditions(family="mla")),
    ),
    evidence="emulator",
    compiles=True,
    upstream=UPSTREAM,
    note="plan() is host work: sessions do it once for a step, outside graphs; a call by itself waits for its lengths, "
    "and cannot be recorded",
)

FLASHINFER_MLA = BackendInfo(
    "flashinfer_mla",
    "cuda",
    (
        Provider(
            "flashinfer-python",
            (
                row(
                    when={"arch": AMPERE_AND_LATER, "kv_dtype": LATENT_DTYPES, "heads": LATENT_HEADS},
                    lowered=DEQUANTISE,
                    **SERVING,
                    **SHAPES,
                    family="mla",
                    dims=(ABSORBED, UNABSORBED),
                    page_size=ANY_PAGE,
                    kv_dtype="auto",
                    lse=True,
                    chunked_prefix=True,
                    deterministic=True,
                    spec_topk=NO_TREE,
                    graph_capture=SESSION,
                ),
            ),
            target="polyattn_cuda.flashinfer.latent:Latent",
            requires=(FLASHINFER_MLA_LIBRARY,),
        ),
    ),
    summary="FlashInfer on latent caches",
    priority=78,
    evidence="emulator",
    compiles=True,
    upstream=UPSTREAM,
)

TRTLLM: dict[str, Any] = {
    **SERVING,
    **SHAPES,
    "family": "paged",
    "head_dim": (64, 128, 256),
    "page_size": (16, 32, 64),
    "kv_layout": ("", "NHD", "HND"),
    "spec_topk": NO_TREE,
    "deterministic": True,
    "graph_capture": True,
}
FP8_KV: dict[str, Any] = {"kv_dtype": ("auto", "fp8_e4m3"), "kv_scales": ("", "tensor")}
LEFT: dict[str, Any] = {"window": Window(right=False)}
DECODE: dict[str, Any] = {"phase": "decode", "s_relation": "one", "causal": "none", **LEFT}
# Of trtllm-gen's generation kernels a block has all heads of a group, in at most 128 rows (fmhaKernels.cuh).
GENERATION: dict[str, Any] = {"group": Range(1, 128)}
VERIFY: dict[str, Any] = {"phase": "verify", "s_relation": ("equal", "fewer"), "causal": "bottom_right", **LEFT}
# What its context kernels write for queries before the first key is said nowhere.
PREFILL: dict[str, Any] = {
    "phase": ("prefill", "extend"),
    "s_relation": ("equal", "one", "fewer"),
    "causal": "bottom_right",
    "kv_dtype": "auto",
    **LEFT,
}
ENCODED: dict[str, Any] = {"phase": ("prefill", "extend"), "causal": "none", "kv_dtype": "auto", "cross": True}


def _trtllm(archs: tuple[str, ...], step: dict[str, Any], lse: bool, **more: Any) -> tuple[Row, ...]:
    """Sinks are in its LSE: a call that wants the LSE is made without them."""
    base = {**TRTLLM, **step, **more, "when": {"arch": archs, "kv_dtype": KV_DTYPES}}
    plain = row(lowered=DEQUANTISE, **base, sinks=True)
    return (plain, row(lowered={**DEQUANTISE, **SINKS}, **base, lse=True)) if lse else (plain,)


BF16: dict[str, Any] = {"dtype": "bfloat16", **FP8_KV}
SAME: dict[str, Any] = {"kv_dtype": "auto"}
# The queries of a group are one tile of XQA's, of at most 32 rows.
XQA: dict[str, Any] = {"group": Range(1, 32)}

TRTLLM_MHA = BackendInfo(
    "trtllm_mha",
    "cuda",
    (
        Provider(
            "flashinfer-python",
            (
                # trtllm-gen on data-centre Blackwell: every phase. FP8 keys are turned into bfloat16 in its decode
                # kernels only; elsewhere it would want FP8 queries.
                *(made for step in (DECODE, VERIFY) for made in _trtllm(BLACKWELL, step, True, **SAME, **GENERATION)),
                *(made for step in (DECODE, VERIFY) for made in _trtllm(BLACKWELL, step, True, **BF16, **GENERATION)),
                *(made for step in (PREFILL, ENCODED) for made in _trtllm(BLACKWELL, step, True)),
                # XQA elsewhere: decode and verification, no LSE. Over an FP8 cache its Hopper kernel quantises Q too.
                *(made for step in (DECODE, VERIFY) for made in _trtllm(HOPPER, step, False, **SAME, **XQA)),
                *(made for step in (DECODE, VERIFY) for made in _trtllm(("sm120",), step, False, **FP8_KV, **XQA)),
            ),
            target="polyattn_cuda.flashinfer.trtllm:TRTLLM",
            requires=(FLASHINFER,),
        ),
    ),
    summary="TensorRT-LLM kernels on paged caches",
    priority=86,
    auto=(
        AutoRule(
            110,
            "Blackwell, K and V of one width, no draft tree: trtllm_mha",
            conditions(family="paged", arch=BLACKWELL, same_dims=(True,), spec_topk=NO_TREE),
        ),
    ),
    evidence="emulator",
    compiles=True,
    upstream=UPSTREAM,
    note="pages of 16, 32 or 64; SGLang also lets some models use 128, polyattn keeps to the documented sizes. FP4 "
    "caches are dequantised by pages",
)


def _latent(lowered: dict[str, str] = DEQUANTISE, **more: Any) -> Row:
    """One entry for all phases; its queries are causal among themselves, and its output is bfloat16."""
    base: dict[str, Any] = {
        **SERVING,
        **SHAPES,
        "dtype": "bfloat16",
        "family": "mla",
        "dims": (ABSORBED,),
        "page_size": (32, 64),
        "kv_dtype": "auto",
        "chunked_prefix": True,
        "deterministic": True,
        "spec_topk": NO_TREE,
        "graph_capture": True,
    }
    return row(when={"arch": BLACKWELL, "kv_dtype": LATENT_DTYPES}, lowered=lowered, **{**base, **more})


FLASHINFER_BLOCK_SPARSE = BackendInfo(
    "flashinfer_block_sparse",
    "cuda",
    (
        Provider(
            "flashinfer-python",
            (
                row(
                    when={"arch": AMPERE_AND_LATER},
                    family="block_sparse",
                    dtype=HALF,
                    head_dim=(64, 128, 256),
                    s_relation=LENGTHS,
                    group=True,
                    scale=True,
                    block_map=(True,),
                    block_shape=True,
                    block_sizes=True,
                    misaligned=True,
                    lse=True,
                ),
            ),
            "polyattn_cuda.flashinfer.block_sparse:BlockSparse",
            (FLASHINFER,),
        ),
    ),
    summary="FlashInfer's attention to blocks of any size, inference only",
    priority=None,
    evidence="emulator",
    compiles=True,
    upstream=UPSTREAM,
    note="each call plans on the host, and lists every key that a block of queries sees: by name only",
)

ONE: dict[str, Any] = {"phase": "decode", "s_relation": "one", "causal": "none"}
SEVERAL: dict[str, Any] = {
    "phase": ("prefill", "extend", "verify"),
    "s_relation": ("equal", "fewer"),
    "causal": "bottom_right",
}
FEW: dict[str, Any] = {**SEVERAL, "phase": "verify"}
TRTLLM_HEADS = (Range(1, 64), 128)
"""Those with a tile: "trtllm-gen MLA decode does not support 64 < num_heads_q < 128"."""
CUTE_HEADS = Range(1, 128)
"""The heads of a query are rows of one tile of 128."""

TRTLLM_MLA = BackendInfo(
    "trtllm_mla",
    "cuda",
    (
        Provider(
            "flashinfer-python",
            (
                *(_latent(**ONE, lse=True, heads=heads) for heads in TRTLLM_HEADS),
                # With numbers of queries that differ between sequences it has no LSE.
                *(_latent(**SEVERAL, heads=heads) for heads in TRTLLM_HEADS),
            ),
            target="polyattn_cuda.flashinfer.trtllm_latent:Generated",
            requires=(FLASHINFER_MLA_LIBRARY,),
        ),
    ),
    summary="TensorRT-LLM kernels on latent caches",
    priority=84,
    auto=(AutoRule(210, "MLA on Blackwell: trtllm_mla", conditions(family="mla", arch=BLACKWELL)),),
    evidence="emulator",
    compiles=True,
    upstream=UPSTREAM,
    note="FP8 caches are dequantised by pages: over FP8 its kernels want FP8 queries",
)

CUTEDSL_MLA = BackendInfo(
    "cutedsl_mla",
    "cuda",
    (
        Provider(
            "cutedsl/flashinfer-python",
            tuple(_latent(**step, lse=True, heads=CUTE_HEADS) for step in (ONE, FEW)),
            target="polyattn_cuda.flashinfer.trtllm_latent:CuteDSL",
            requires=(FLASHINFER_MLA_LIBRARY,),
        ),
    ),
    summary="CuTe DSL kernels on latent caches, decode only",
    priority=70,
    evidence="emulator",
    compiles=True,
    upstream=UPSTREAM,
    note="decode and verification only: pair it with a prefill backend such as trtllm_mla",
)

TOKENSPEED_MLA = BackendInfo(
    "tokenspeed_mla",
    "cuda",
    (
        Provider(
            "flashinfer-python",
            tuple(_latent({}, **step, kv_dtype="fp8_e4m3", lse=True, heads=CUTE_HEADS) for step in (ONE, FEW)),
            "polyattn_cuda.flashinfer.trtllm_latent:TokenSpeed",
            (FLASHINFER_MLA_LIBRARY,),
            Accuracy(0.998, 0.06),
        ),
    ),
    summary="CuTe DSL kernels on latent caches of e4m3, queries and attention weights rounded to e4m3 too",
    priority=None,
    evidence="emulator",
    lossy="queries and attention weights in e4m3: relative error about 0.03",
    upstream=UPSTREAM,
    note="decode and verification only, over an e4m3 cache with one scale: --kv-cache-scales tensor",
)

BACKENDS = (
    FLASHINFER_MHA,
    FLASHINFER_MLA,
    FLASHINFER_BLOCK_SPARSE,
    TRTLLM_MHA,
    TRTLLM_MLA,
    CUTEDSL_MLA,
    TOKENSPEED_MLA,
)
