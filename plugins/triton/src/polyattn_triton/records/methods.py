"""Methods with portable kernels, on every platform but CUDA, where polyattn-cuda lists them beside the vendors' own.

A row that changes here changes in polyattn-cuda too (its provider `polyattn-triton`); a test compares them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from polyattn.contract import Accuracy, Alias, BackendInfo, Provider, Range, Row, row
from polyattn.methods.video.records import portable

from .common import ANY_PAGE, HALF, INTERPRETED, LENGTHS, NO_TREE, PHASES, PLATFORMS, TRITON

ELSEWHERE = tuple(platform for platform in PLATFORMS if platform != "cuda")

LISTED: dict[str, Any] = {
    "family": "mla",
    "token_topk": Range(1),
    "dtype": (*HALF, "float32"),
    "phase": PHASES,
    "s_relation": LENGTHS,
    "causal": ("none", "bottom_right"),
    "group": True,
    "scale": True,
    "spec_topk": NO_TREE,
    "lse": True,
    "page_size": ANY_PAGE,
    "graph_capture": True,
    "zero_size": True,
}
DSA_ROWS = (
    row(
        kv_dtype="auto",
        misaligned=True,
        head_dim=Range(16, 576, multiple_of=8),
        v_head_dim=Range(16, 512, multiple_of=8),
        **LISTED,
    ),
    row(kv_dtype="fp8_e4m3", kv_scales="block128", dims=((576, 512),), **LISTED),
)
DUAL_CHUNK_ROW = row(
    family="paged",
    method="dual_chunk",
    dtype=HALF,
    head_dim=Range(16, 256, multiple_of=8),
    page_size=ANY_PAGE,
    phase=PHASES[:3],
    s_relation=LENGTHS,
    causal=("none", "bottom_right"),
    group=True,
    scale=True,
    softcap=True,
    lse=True,
    save_kv_cache=True,
    graph_capture=True,
    misaligned=True,
)
SAGE_SLA_ROW = row(
    when={"place": True},
    family="dense",
    s_relation="equal",
    dtype=HALF,
    head_dim=(64, 128),
    group=True,
    misaligned=True,
)
INT8 = Accuracy(0.998, 0.06)


def _sage_sla(platform: str) -> BackendInfo:
    """SageSLA by the kernel of this package alone: core's emulation, which is for CPUs, has its error and no speed."""
    own = Provider(
        "polyattn-triton", (SAGE_SLA_ROW,), "polyattn_triton.sage_sla:SageSLA", (TRITON[platform],), accuracy=INT8
    )
    return dataclasses.replace(portable("sage_sla_attn", platform), providers=(own,), note="")


def _provider(platform: str, target: str, *limits: Row) -> tuple[Provider, ...]:
    return (Provider("polyattn-triton", limits, target, requires=(TRITON[platform],)),)


def _backends(platform: str) -> tuple[BackendInfo, ...]:
    return (
        BackendInfo(
            "dsa",
            platform,
            _provider(platform, "polyattn_triton.listed:Listed", *DSA_ROWS),
            summary="DeepSeek sparse attention: an indexer's top-k tokens over a latent cache",
            priority=INTERPRETED if platform == "cpu" else 60,
            aliases=(Alias("nsa", ("mla",)),),
            evidence="interpreter" if platform == "cpu" else "declared",
            upstream="polyattn",
            note="serves calls with lists of tokens only; which tokens is the model's own choice",
        ),
        BackendInfo(
            "dual_chunk_flash_attn",
            platform,
            _provider(platform, "polyattn_triton.paged:Paged", DUAL_CHUNK_ROW),
            summary="Dual chunk attention of the Qwen 1M models",
            priority=INTERPRETED if platform == "cpu" else 58,
            evidence="interpreter" if platform == "cpu" else "declared",
            upstream="polyattn",
            note="serves layers of dual chunk attention only, as every paged backend with an LSE does too",
        ),
    )


BACKENDS: tuple[BackendInfo, ...] = (
    *(b for platform in ELSEWHERE for b in _backends(platform)),
    *(_sage_sla(platform) for platform in ELSEWHERE if platform != "cpu"),
)
