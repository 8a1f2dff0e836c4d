"""cuDNN on paged caches, by the graphs that FlashInfer builds for it.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.contract import BackendInfo, Provider, Requirement, Row, Window, row

from .common import (
    AMPERE_AND_LATER,
    CAUSAL,
    DEQUANTISE,
    HALF,
    KV_DTYPES,
    LENGTHS,
    NO_TREE,
    SINKS,
    UNABSORBED,
    free_slots,
)
from .cudnn import CUDNN_FRONTEND
from .defects import CUDNN_PAGED_BITS

FLASHINFER_CUDNN = Requirement(
    "flashinfer-python",
    ">=0.7.1",
    module="flashinfer.cudnn",
    hint="pip install -U flashinfer-python",
    also=("flashinfer",),
)
"""With lengths in tokens, and the base of an LSE as an argument."""

PAGED: dict[str, Any] = {
    "family": "paged",
    "dtype": HALF,
    "page_size": (16, 32, 64, 128),
    "kv_layout": ("", "NHD", "HND"),
    "kv_dtype": "auto",
    "group": True,
    "scale": True,
    "lse": True,
    "save_kv_cache": True,
    "spec_topk": NO_TREE,
    "misaligned": True,
    "zero_size": True,
    "graph_capture": True,
}
WIDTHS: tuple[dict[str, Any], ...] = ({"head_dim": (64, 128)}, {"dims": (UNABSORBED,)})
# One query of each sequence is its decode graph, which alone knows a window and has other bits in each run.
DECODE: dict[str, Any] = {"phase": "decode", "s_relation": "one", "causal": "none"}
EXACT: dict[str, Any] = {"deterministic": True}
STEPS: tuple[dict[str, Any], ...] = (
    {**DECODE, "window": Window(right=False)},
    {**DECODE, **EXACT},
    {**EXACT, "phase": ("prefill", "extend", "verify"), "s_relation": LENGTHS, "causal": CAUSAL, "cross": True},
)


def _rows() -> tuple[Row, ...]:
    when = {"arch": AMPERE_AND_LATER, "kv_dtype": KV_DTYPES}
    return tuple(
        row(when=when, lowered={**DEQUANTISE, **SINKS}, **PAGED, **width, **step) for step in STEPS for width in WIDTHS
    )


FLASHINFER_CUDNN_MHA = BackendInfo(
    "flashinfer_cudnn",
    "cuda",
    (
        Provider(
            "flashinfer-python",
            _rows(),
            target="polyattn_cuda.flashinfer.cudnn:CuDNN",
            requires=(FLASHINFER_CUDNN, CUDNN_FRONTEND),
            defects=(CUDNN_PAGED_BITS,),
        ),
    ),
    summary="cuDNN on paged caches, through FlashInfer",
    priority=None,
    evidence="emulator",
    upstream="https://github.com/flashinfer-ai/flashinfer",
    config=(free_slots("pages are copied without it, for a decode step on Hopper not"),),
    note="by name only: free slots of a page are multiplied by 0, but by its decode graph on Hopper, so pages are "
    "copied unless the option free_slots says finite. A graph is built, on the host, for each new shape of a batch "
    "and each further 2,048 keys",
)

BACKENDS = (FLASHINFER_CUDNN_MHA,)
