"""Serving kernels of other libraries: FlashMLA, CUTLASS MLA, HPC-Ops, sparse MLA and dual chunk attention.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.records import Alias, BackendInfo, Provider, Range, Requirement, Row, row

from .common import (
    ABSORBED,
    ANY_PAGE,
    BLACKWELL,
    DEQUANTISE,
    FLASHINFER,
    HALF,
    HOPPER,
    KV_DTYPES,
    NO_TREE,
    PHASES,
    PORTABLE,
    SERVING,
    SGL_KERNEL,
    UNABSORBED,
)

FLASH_MLA = Requirement(
    "flash-mla",
    module="flash_mla.flash_mla_interface",
    hint="run pip install . in a checkout of https://github.com/deepseek-ai/FlashMLA, or pip install sgl-flash-mla",
)
SGL_FLASH_MLA = Requirement("sgl-flash-mla", module="flash_mla.flash_mla_interface", hint="pip install sgl-flash-mla")
HPC_OPS_PACKAGE = Requirement(
    "hpc-ops", module="hpc", hint="build it from https://github.com/Tencent/hpc-ops; it is not on PyPI"
)


def _flashmla(**kv: Any) -> Row:
    return row(
        when={"arch": HOPPER, "kv_dtype": KV_DTYPES},
        lowered=DEQUANTISE,
        **SERVING,
        family="mla",
        dims=(ABSORBED,),
        page_size=64,
        lse=True,
        chunked_prefix=True,
        spec_topk=NO_TREE,
        graph_capture=True,
        **kv,
    )


FLASHMLA = BackendInfo(
    "flashmla",
    "cuda",
    (
        Provider(
            "sgl-flash-mla",
            (_flashmla(kv_dtype=("auto", "fp8_e4m3"), kv_scales=("", "tensor", "block128")),),
            requires=(SGL_FLASH_MLA,),
        ),
        Provider("flash-mla", (_flashmla(kv_dtype="auto"),), requires=(FLASH_MLA,)),
    ),
    summary="FlashMLA on latent caches",
    priority=76,
    upstream="https://github.com/deepseek-ai/FlashMLA",
    note="pages of 64; the build from FlashMLA's own source reads FP8 only in its sparse kernels",
)


def _cutlass(**phase: Any) -> Row:
    return row(
        when={"arch": BLACKWELL, "kv_dtype": KV_DTYPES},
        lowered=DEQUANTISE,
        family="mla",
        page_size=128,
        kv_scales=("", "tensor"),
        graph_capture=True,
        **{**SERVING, **phase},
    )


CUTLASS_DECODE = _cutlass(
    phase="decode", s_relation="one", dims=(ABSORBED,), kv_dtype=("auto", "fp8_e4m3"), spec_topk=NO_TREE
)
CUTLASS_REST = _cutlass(
    phase=("prefill", "extend", "verify"),
    dims=(ABSORBED, UNABSORBED),
    kv_dtype="auto",
    spec_topk=NO_TREE,
    chunked_prefix=True,
    lse=True,
)

CUTLASS_MLA = BackendInfo(
    "cutlass_mla",
    "cuda",
    (
        Provider("sgl-kernel", (CUTLASS_DECODE,), requires=(SGL_KERNEL,)),
        Provider("sgl-kernel+flashinfer", (CUTLASS_DECODE, CUTLASS_REST), requires=(SGL_KERNEL, FLASHINFER)),
    ),
    summary="CUTLASS on latent caches",
    priority=68,
    upstream="https://github.com/sgl-project/sglang/tree/main/sgl-kernel",
    note="the kernel decodes one query per sequence; every other phase is FlashInfer's, as it was in SGLang, which "
    "has since dropped the name",
)

HPC_OPS = BackendInfo(
    "hpc_ops",
    "cuda",
    (
        Provider(
            "hpc-ops",
            (
                row(
                    when={"arch": HOPPER, "kv_dtype": KV_DTYPES},
                    lowered=DEQUANTISE,
                    family="paged",
                    dtype="bfloat16",
                    head_dim=128,
                    group=(4, 8),
                    page_size=64,
                    kv_dtype=("auto", "fp8_e4m3"),
                    kv_scales=("", "tensor"),
                    phase=("prefill", "extend", "decode"),
                    s_relation=("equal", "one", "fewer"),
                    causal=("none", "bottom_right"),
                    save_kv_cache=True,
                    graph_capture=True,
                ),
            ),
            requires=(HPC_OPS_PACKAGE,),
        ),
    ),
    summary="HPC-Ops on paged caches",
    priority=64,
    upstream="https://github.com/Tencent/hpc-ops",
    note="the scale is fixed at D_qk ** -0.5",
)

# FlashMLA's sparse kernels read 656-byte FP8 rows (512 e4m3, 4 float32 scales, 64 bfloat16) or plain bfloat16 ones.
SPARSE_MLA: dict[str, Any] = {
    **SERVING,
    "family": "mla",
    "method": "dsa",
    "dims": (ABSORBED,),
    "kv_dtype": ("auto", "fp8_e4m3"),
    "kv_scales": ("", "block128"),
    "spec_topk": NO_TREE,
    "lse": True,
}
SPARSE_CUDA = row(
    when={"arch": (*HOPPER, *BLACKWELL)}, **{**SPARSE_MLA, "dtype": "bfloat16"}, page_size=64, graph_capture=True
)

DSA = BackendInfo(
    "dsa",
    "cuda",
    (
        Provider("sgl-flash-mla", (SPARSE_CUDA,), requires=(SGL_FLASH_MLA,)),
        Provider("flash-mla", (SPARSE_CUDA,), requires=(FLASH_MLA,)),
        Provider("polyattn-triton", (row(**SPARSE_MLA, page_size=ANY_PAGE),), requires=(PORTABLE,)),
    ),
    summary="DeepSeek sparse attention: an indexer's top-k tokens over a latent cache",
    priority=60,
    aliases=(Alias("nsa", ("mla",)),),
    upstream="https://github.com/deepseek-ai/FlashMLA",
    note="serves requests of method dsa only; its choice of tokens is the model's own",
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
                    s_relation=("equal", "one", "fewer"),
                    causal=("none", "bottom_right"),
                    group=True,
                    scale=True,
                    save_kv_cache=True,
                ),
            ),
            requires=(PORTABLE,),
        ),
    ),
    summary="Dual chunk attention of the Qwen 1M models",
    priority=58,
    upstream="polyattn",
    note="serves requests of method dual_chunk only; SGLang has dropped the name, polyattn keeps it",
)

BACKENDS = (FLASHMLA, CUTLASS_MLA, HPC_OPS, DSA, DUAL_CHUNK)
