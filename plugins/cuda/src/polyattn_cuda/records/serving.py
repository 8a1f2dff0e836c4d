"""Serving kernels of other libraries: FlashMLA, CUTLASS MLA, HPC-Ops, sparse MLA and dual chunk attention.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.contract import SESSION, Alias, BackendInfo, OneOf, Provider, Range, Requirement, row

from .common import (
    ABSORBED,
    ANY_PAGE,
    BLACKWELL,
    DEQUANTISE,
    HALF,
    HOPPER,
    KV_DTYPES,
    LATENT_DTYPES,
    NO_TREE,
    PHASES,
    PORTABLE,
    SERVING,
    TRITON,
    UNABSORBED,
    free_slots,
)
from .flashinfer import FLASHINFER_MLA_LIBRARY, LATENT_HEADS, SHAPES

FLASH_MLA = Requirement(
    "flash-mla",
    module="flash_mla.flash_mla_interface",
    hint="run pip install . in a checkout of https://github.com/deepseek-ai/FlashMLA",
)
SGL_FLASH_MLA = Requirement("sgl-flash-mla", module="flash_mla.flash_mla_interface", hint="pip install sgl-flash-mla")
VLLM_FLASH_MLA = Requirement("vllm", module="vllm.third_party.flashmla.flash_mla_interface", hint="pip install vllm")
SGL_CUTLASS = Requirement(
    "sgl-kernel",
    "<0.4.7",
    module="sgl_kernel.attention",
    hint="pip install 'sglang-kernel<0.4.7'",
    also=("sglang-kernel",),
)
"""0.4.7 has no CUTLASS latent decode any more."""
HPC_OPS_PACKAGE = Requirement(
    "hpc-ops", module="hpc", hint="build it from https://github.com/Tencent/hpc-ops; it is not on PyPI"
)


PAGE = 64
"""Tokens of a page of FlashMLA."""

FLASHMLA_COMMON: dict[str, Any] = {
    **SERVING,
    "family": "mla",
    "dims": (ABSORBED,),
    "page_size": PAGE,
    "lse": True,
    "chunked_prefix": True,
    "spec_topk": NO_TREE,
    "graph_capture": True,
    "misaligned": True,
    "zero_size": True,
}
FLASHMLA_ROWS = (
    row(
        when={"arch": HOPPER, "kv_dtype": LATENT_DTYPES},
        lowered=DEQUANTISE,
        **FLASHMLA_COMMON,
        kv_dtype="auto",
        note="dense_attn_decode_interface: SM90 only, pages of 64, one dtype for queries and rows",
    ),
    row(
        when={"arch": (*HOPPER, *BLACKWELL)},
        **{
            **FLASHMLA_COMMON,
            "dtype": "bfloat16",
            "phase": ("decode", "verify"),
            "group": (64, 128),
            "kv_dtype": "fp8_e4m3",
            "kv_scales": "block128",
        },
        note="sparse_attn_decode_interface: bfloat16 queries of 64 or 128 heads over rows of 656 bytes",
    ),
)

FLASHMLA = BackendInfo(
    "flashmla",
    "cuda",
    (
        Provider("sgl-flash-mla", FLASHMLA_ROWS, "polyattn_cuda.flashmla:SglFlashMLA", (SGL_FLASH_MLA,)),
        Provider("flash-mla", FLASHMLA_ROWS, "polyattn_cuda.flashmla:FlashMLA", (FLASH_MLA,)),
        Provider("vllm", FLASHMLA_ROWS, "polyattn_cuda.flashmla:VllmFlashMLA", (VLLM_FLASH_MLA,)),
    ),
    summary="FlashMLA on latent caches",
    priority=76,
    evidence="emulator",
    upstream="https://github.com/deepseek-ai/FlashMLA",
    note="pages of 64; FP8 rows of 656 bytes are read by its sparse kernel, for decode and verify. SGLang's dense FP8 "
    "kernel is not used: it quantises the queries too",
)


CUTLASS: dict[str, Any] = {
    **SERVING,
    **SHAPES,
    "family": "mla",
    "page_size": 128,
    "kv_dtype": "auto",
    "deterministic": True,
    "spec_topk": NO_TREE,
    "graph_capture": True,
}
CUTLASS_DECODE = row(
    when={"arch": BLACKWELL, "kv_dtype": LATENT_DTYPES},
    lowered=DEQUANTISE,
    **{**CUTLASS, "phase": "decode", "s_relation": "one"},
    dims=(ABSORBED,),
    heads=Range(1, 128),
)
CUTLASS_REST = row(
    when={"arch": BLACKWELL, "kv_dtype": LATENT_DTYPES, "heads": LATENT_HEADS},
    lowered=DEQUANTISE,
    **{**CUTLASS, "graph_capture": SESSION},
    dims=(ABSORBED, UNABSORBED),
    chunked_prefix=True,
    lse=True,
)

CUTLASS_MLA = BackendInfo(
    "cutlass_mla",
    "cuda",
    (
        Provider(
            "sgl-kernel",
            (CUTLASS_DECODE,),
            target="polyattn_cuda.flashinfer.cutlass_latent:CutlassMLA",
            requires=(SGL_CUTLASS,),
        ),
        Provider(
            "sgl-kernel+flashinfer",
            (CUTLASS_DECODE, CUTLASS_REST),
            target="polyattn_cuda.flashinfer.cutlass_latent:CutlassMLA",
            requires=(SGL_CUTLASS, FLASHINFER_MLA_LIBRARY),
        ),
    ),
    summary="CUTLASS on latent caches",
    priority=68,
    evidence="emulator",
    compiles=True,
    upstream="https://github.com/sgl-project/sglang/tree/main/sgl-kernel",
    note="the kernel decodes one query per sequence without an LSE; everything else is FlashInfer's, as it was in "
    "SGLang, which has since dropped the name",
)

HPC: dict[str, Any] = {
    "when": {"arch": HOPPER, "kv_dtype": KV_DTYPES},
    "lowered": DEQUANTISE,
    "family": "paged",
    "dtype": "bfloat16",
    "head_dim": 128,
    "group": (4, 8),
    "page_size": PAGE,
    "kv_dtype": "auto",
    "kv_layout": ("", "NHD", "HND"),
    "save_kv_cache": True,
    "graph_capture": True,
    "misaligned": True,
    "zero_size": True,
}

HPC_OPS = BackendInfo(
    "hpc_ops",
    "cuda",
    (
        Provider(
            "hpc-ops",
            (
                row(**HPC, phase="decode", s_relation="one", note="attention_decode_bf16"),
                row(
                    **HPC,
                    phase=("prefill", "extend"),
                    s_relation=("equal", "fewer"),
                    causal=OneOf(("bottom_right",)),
                    note="attention_with_kvcache_prefill_bf16, which is always causal",
                ),
            ),
            "polyattn_cuda.hpc_ops:HpcOps",
            (HPC_OPS_PACKAGE,),
        ),
    ),
    summary="HPC-Ops on paged caches",
    priority=None,
    evidence="emulator",
    config=(free_slots("pages are copied without it"),),
    upstream="https://github.com/Tencent/hpc-ops",
    note="by name only: it multiplies free slots of a page by 0, so pages are copied unless the option free_slots "
    "says finite; its FP8 kernels quantise the queries too and are not used",
)

# FlashMLA's sparse kernels read 656-byte FP8 rows (512 e4m3, 4 float32 scales, 64 bfloat16) or plain bfloat16 ones.
SPARSE: dict[str, Any] = {
    **{name: words for name, words in FLASHMLA_COMMON.items() if name not in ("chunked_prefix", "dtype")},
    "dtype": "bfloat16",
    "group": (64, 128),
    "token_topk": Range(1),
}
SPARSE_ROWS = tuple(
    row(when={"arch": (*HOPPER, *BLACKWELL)}, **SPARSE, kv_dtype=dtype, kv_scales=scales, note=note)
    for dtype, scales, note in (
        ("auto", "", "sparse_attn_prefill_interface: bfloat16 rows, 64 or 128 heads"),
        ("fp8_e4m3", "block128", "sparse_attn_decode_interface: rows of 656 bytes, 64 or 128 heads"),
    )
)

_LISTED: dict[str, Any] = {
    "family": "mla",
    "token_topk": Range(1),
    "dtype": (*HALF, "float32"),
    "phase": PHASES,
    "s_relation": ("equal", "one", "fewer", "more"),
    "causal": ("none", "bottom_right"),
    "group": True,
    "scale": True,
    "spec_topk": NO_TREE,
    "lse": True,
    "page_size": ANY_PAGE,
    "graph_capture": True,
    "zero_size": True,
}
PORTABLE_ROWS = (
    row(
        kv_dtype="auto",
        misaligned=True,
        head_dim=Range(16, 576, multiple_of=8),
        v_head_dim=Range(16, 512, multiple_of=8),
        **_LISTED,
    ),
    row(kv_dtype="fp8_e4m3", kv_scales="block128", dims=(ABSORBED,), **_LISTED),
)

DSA = BackendInfo(
    "dsa",
    "cuda",
    (
        Provider(
            "flashmla_sparse/sgl-flash-mla",
            SPARSE_ROWS,
            "polyattn_cuda.flashmla_sparse:SglFlashMLASparse",
            (SGL_FLASH_MLA,),
        ),
        Provider(
            "flashmla_sparse/flash-mla", SPARSE_ROWS, "polyattn_cuda.flashmla_sparse:FlashMLASparse", (FLASH_MLA,)
        ),
        Provider(
            "flashmla_sparse/vllm", SPARSE_ROWS, "polyattn_cuda.flashmla_sparse:VllmFlashMLASparse", (VLLM_FLASH_MLA,)
        ),
        Provider("polyattn-triton", PORTABLE_ROWS, "polyattn_triton.listed:Listed", (PORTABLE, TRITON)),
    ),
    summary="DeepSeek sparse attention: an indexer's top-k tokens over a latent cache",
    priority=60,
    aliases=(Alias("nsa", ("mla",)), Alias("flashmla_sparse", ("mla",), provider="flashmla_sparse")),
    upstream="https://github.com/deepseek-ai/FlashMLA",
    evidence="emulator",
    note="serves calls with lists of tokens only; which tokens is the model's own choice",
)

DUAL_CHUNK = BackendInfo(
    "dual_chunk_flash_attn",
    "cuda",
    (
        Provider(
            "polyattn-triton",
            (
                row(
                    family="paged",
                    method="dual_chunk",
                    dtype=HALF,
                    head_dim=Range(16, 256, multiple_of=8),
                    page_size=ANY_PAGE,
                    phase=PHASES[:3],
                    s_relation=("equal", "one", "fewer", "more"),
                    causal=("none", "bottom_right"),
                    group=True,
                    scale=True,
                    softcap=True,
                    lse=True,
                    save_kv_cache=True,
                    graph_capture=True,
                    misaligned=True,
                ),
            ),
            "polyattn_triton.paged:Paged",
            (PORTABLE, TRITON),
        ),
    ),
    summary="Dual chunk attention of the Qwen 1M models",
    priority=58,
    upstream="polyattn",
    evidence="interpreter",
    note="serves layers of dual chunk attention only, as every paged backend with an LSE does too; SGLang has dropped "
    "the name, polyattn keeps it",
)

BACKENDS = (FLASHMLA, CUTLASS_MLA, HPC_OPS, DSA, DUAL_CHUNK)
