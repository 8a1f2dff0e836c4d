"""Diffusion: quantised attention (Sage, Sparge) and sparse video methods, approximate and so never automatic; cuDNN.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.contract import Accuracy, BackendInfo, ConfigField, Fallback, Provider, Range, Requirement, Row, row
from polyattn.methods.video.options import SAGE_SLA, dense_by_rule
from polyattn.methods.video.records import portable

from .common import (
    AMPERE_AND_LATER,
    CAUSAL,
    FLASH_ATTN_2,
    FLASHINFER,
    HALF,
    HOPPER,
    LENGTHS,
    PORTABLE,
    TRAINABLE,
    TRITON,
)
from .cudnn import CUDNN

SAGE_1 = Requirement("sageattention", ">=1,<2", module="sageattention.core", hint="pip install 'sageattention<2'")
SAGE_2 = Requirement(
    "sageattention",
    ">=2.2,<3",
    module="sageattention.core",
    hint="build https://github.com/thu-ml/SageAttention from source: PyPI has 1.x only",
)
SAGE_3 = Requirement(
    "sageattn3",
    module="sageattn3",
    hint="build sageattention3_blackwell of https://github.com/thu-ml/SageAttention; it is not on PyPI",
)
SPARGE = Requirement(
    "spas-sage-attn",
    module="spas_sage_attn.core",
    hint="run pip install . in a checkout of https://github.com/thu-ml/SpargeAttn; it is not on PyPI",
)
# What such products keep of normally distributed tensors, and what no lost block or swapped head does.
INT8_FP16, INT8_FP8, FP4 = Accuracy(0.9995, 0.03), Accuracy(0.998, 0.06), Accuracy(0.98, 0.2)
SAGE_2_ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "sm121")


def _sage(archs: tuple[str, ...], width: Any, **limits: Any) -> tuple[Row, ...]:
    """Causal is right only when S_q = S_k: Sage's mask starts in the upper left corner."""
    base = {
        "when": {"arch": archs},
        "family": "dense",
        "dtype": HALF,
        "head_dim": width,
        "group": True,
        "scale": True,
        "misaligned": True,
        **limits,
    }
    return (row(**base, s_relation=LENGTHS, cross=True), row(**base, s_relation="equal", causal=CAUSAL))


SAGE_ATTN = BackendInfo(
    "sage_attn",
    "cuda",
    (
        Provider(
            "sage2", _sage(SAGE_2_ARCHS, Range(1, 128), lse=True), "polyattn_cuda.sage:Sage2", (SAGE_2,), INT8_FP8
        ),
        Provider("sage1", _sage(AMPERE_AND_LATER, (64, 96, 128)), "polyattn_cuda.sage:Sage1", (SAGE_1,), INT8_FP16),
    ),
    summary="SageAttention: INT8 scores",
    priority=None,
    evidence="emulator",
    fallbacks=(Fallback("fa", "SageAttention is not installed or the call is outside its limits"),),
    lossy="INT8 QK, FP16 or FP8 PV: cosine at least 0.9995 (1.x) or 0.998 (2.x)",
    upstream="https://github.com/thu-ml/SageAttention",
    note="1.x without a causal mask is called twice where S_k is no multiple of 64: it lets the keys that fill up its "
    "last block take part; where values are in float16 (1.x, and 2.x on SM80 and SM86), those of a block whose sum is "
    "beyond it are lost",
)

SAGE_ATTN_3 = BackendInfo(
    "sage_attn_3",
    "cuda",
    (
        Provider(
            "sageattn3",
            (
                row(
                    when={"arch": "sm120"},
                    lowered={"group": "expand_gqa_heads"},
                    family="dense",
                    dtype=HALF,
                    head_dim=(64, 128),
                    s_relation="equal",
                    causal=CAUSAL,
                    misaligned=True,
                ),
            ),
            "polyattn_cuda.sage3:Sage3",
            (SAGE_3,),
            FP4,
        ),
    ),
    summary="SageAttention 3: FP4 on SM120",
    priority=None,
    evidence="emulator",
    lossy="FP4 QK and PV: cosine at least 0.98",
    upstream="https://github.com/thu-ml/SageAttention",
    note="the kernel centres K in place and fixes the scale: K is copied, another scale goes into the queries",
)

SPARGE_ATTN = BackendInfo(
    "sparge_attn",
    "cuda",
    (
        Provider(
            "spas-sage-attn",
            (
                row(
                    when={"arch": ("sm80", "sm86", "sm87", "sm89", "sm90", "sm120")},
                    lowered={"group": "expand_gqa_heads"},
                    family="dense",
                    dtype=HALF,
                    head_dim=(64, 128),
                    s_relation=LENGTHS,
                    cross=True,
                    scale=True,
                    misaligned=True,
                    note="its kernels are given no causal flag: blocks on the diagonal would see later keys",
                ),
            ),
            "polyattn_cuda.sparge:Sparge",
            (SPARGE,),
            INT8_FP8,
        ),
        Provider(
            "blocks",
            (
                row(
                    # On SM90 its blocks are of 64 queries and 128 keys, and what its flags are of there is not said.
                    when={"arch": ("sm80", "sm86", "sm87", "sm89", "sm120")},
                    family="block_sparse",
                    dtype=HALF,
                    head_dim=(64, 128),
                    s_relation=LENGTHS,
                    group=True,
                    scale=True,
                    block_map=(True,),
                    block_shape=((128, 64),),
                    misaligned=True,
                ),
            ),
            "polyattn_cuda.sparge:SpargeBlocks",
            (SPARGE,),
            INT8_FP8,
        ),
    ),
    summary="SpargeAttn: INT8 scores of the key blocks that it predicts to matter, or that are listed",
    priority=None,
    evidence="emulator",
    config=(
        ConfigField("topk", "float", 0.5, "share of the key blocks that a block of queries attends to", low=0, high=1),
        ConfigField("pvthreshd", "int", 50, "a block is skipped whose scores are this far below the largest", low=0),
    ),
    lossy="sparse, and INT8 QK over the key blocks it keeps: cosine at least 0.998 at topk = 1",
    upstream="https://github.com/thu-ml/SpargeAttn",
    note="it takes values to float16 first: those beyond it are lost",
)

# Every sparse video method is self-attention over one grid, so it needs a place: S_q = S_k, no causal mask, keys of the
# same sequence.
PLACED: dict[str, Any] = {"place": True}
SPARSE: dict[str, Any] = {"family": "dense", "s_relation": "equal"}
LOSSY = "sparse: exact over the keys it keeps, dense only at full budget"

FASTVIDEO = Requirement("fastvideo-kernel", module="fastvideo_kernel", hint="pip install fastvideo-kernel")

FASTVIDEO_BLOCKS = BackendInfo(
    "fastvideo",
    "cuda",
    (
        Provider(
            "fastvideo-kernel",
            (
                row(
                    when={"arch": AMPERE_AND_LATER},
                    family="block_sparse",
                    dtype="bfloat16",
                    head_dim=(64, 128),
                    s_relation="equal",
                    group=True,
                    block_map=(True,),
                    block_shape=((64, 64),),
                    block_sizes=True,
                    misaligned=True,
                    grad=TRAINABLE,
                ),
            ),
            "polyattn_cuda.fastvideo:BlockSparse",
            (FASTVIDEO,),
        ),
    ),
    summary="The block-sparse kernels of FastVideo's video sparse attention, forward and backward",
    priority=None,
    evidence="emulator",
    compiles=True,
    upstream="https://github.com/hao-ai-lab/FastVideo",
)

# Tiles of 6x8x8 on the three canvases it was compiled for (30x48x80, 36x48x48, 18x48x80); the scale is fixed.
STA_ROW = row(when={**PLACED, "arch": HOPPER}, **SPARSE, dtype=HALF, head_dim=128)

SLIDING_TILE = portable(
    "sliding_tile_attn",
    "cuda",
    Provider("st-attn", (STA_ROW,), requires=(Requirement("st-attn", module="st_attn", hint="pip install st_attn"),)),
    Provider("fastvideo-kernel", (STA_ROW,), requires=(FASTVIDEO,)),
    to="fa",
    upstream="https://github.com/hao-ai-lab/FastVideo",
    note="st-attn and fastvideo-kernel have windows on three grids alone, and are planned: docs/video.md",
)

VSA_ROW = row(when=PLACED, **SPARSE, dtype="bfloat16", head_dim=(64, 128), grad=TRAINABLE)

VIDEO_SPARSE = portable(
    "video_sparse_attn",
    "cuda",
    Provider("fastvideo-kernel", (VSA_ROW,), requires=(FASTVIDEO,)),
    Provider("vsa", (VSA_ROW,), requires=(Requirement("vsa", module="vsa", hint="pip install vsa"),)),
    to="fa",
    upstream="https://github.com/hao-ai-lab/FastVideo",
)

VMOBA_ATTN = portable(
    "vmoba_attn",
    "cuda",
    Provider(
        "vmoba",
        (row(when=PLACED, **SPARSE, dtype=HALF, head_dim=(64, 128), grad=TRAINABLE),),
        requires=(
            Requirement(
                "vmoba",
                module="kernel.attn.vmoba_attn.vmoba",
                hint="install the V-MoBA kernels of https://github.com/hao-ai-lab/FastVideo; they are not on PyPI",
            ),
            FLASH_ATTN_2,
        ),
    ),
    to="fa",
    upstream="https://github.com/KwaiVGI/VMoBA",
)

SLA_ATTN = portable("sla_attn", "cuda", to="fa", upstream="https://github.com/thu-ml/SLA")

SAGE_SLA_ATTN = BackendInfo(
    "sage_sla_attn",
    "cuda",
    (
        Provider(
            "spas-sage-attn",
            (
                row(
                    when={**PLACED, "arch": ("sm80", "sm86", "sm89", "sm90", "sm120")},
                    **SPARSE,
                    dtype=HALF,
                    head_dim=(64, 128),
                ),
            ),
            requires=(SPARGE,),
        ),
        Provider(
            "polyattn-triton",
            (row(when=PLACED, **SPARSE, dtype=HALF, head_dim=(64, 128), group=True, misaligned=True),),
            "polyattn_triton.sage_sla:SageSLA",
            (PORTABLE, TRITON),
            INT8_FP8,
        ),
    ),
    summary="SLA with INT8 scores (SageSLA), inference only",
    priority=None,
    fallbacks=dense_by_rule("fa"),
    config=SAGE_SLA,
    lossy="sparse, and INT8 QK over the keys it keeps: cosine at least 0.998 to SLA",
    upstream="https://github.com/thu-ml/SLA",
)

SVG2_ATTN = portable(
    "sparse_video_gen_2_attn",
    "cuda",
    Provider(
        "svg",
        (row(when=PLACED, **SPARSE, dtype=HALF, head_dim=(64, 128, 256)),),
        requires=(
            Requirement(
                "svg",
                module="svg.kmeans_utils",
                hint="run pip install . in a checkout of https://github.com/svg-project/Sparse-VideoGen; "
                "it is not on PyPI",
            ),
            FLASHINFER,
        ),
    ),
    to="fa",
    upstream="https://github.com/svg-project/Sparse-VideoGen",
)

BACKENDS = (
    CUDNN,
    SAGE_ATTN,
    SAGE_ATTN_3,
    SPARGE_ATTN,
    FASTVIDEO_BLOCKS,
    SLIDING_TILE,
    VIDEO_SPARSE,
    VMOBA_ATTN,
    SLA_ATTN,
    SAGE_SLA_ATTN,
    SVG2_ATTN,
)
