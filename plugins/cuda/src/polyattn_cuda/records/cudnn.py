"""cuDNN's attention, through its front end and through PyTorch, on dense and packed batches, with its backward.

To change what a kernel takes, edit its row: an option that is not named there is refused, with a reason.
"""

from __future__ import annotations

from typing import Any

from polyattn.contract import BackendInfo, Provider, Range, Requirement, Row, Window, row

from .common import AMPERE_AND_LATER, CAUSAL, HALF, HOPPER, LENGTHS, SINKS, TRAINABLE_LSE
from .defects import CUDNN_LOW_LSE, CUDNN_PACKED_GAPS

CUDNN_FRONTEND = Requirement(
    "nvidia-cudnn-frontend", ">=1.32", module="cudnn.sdpa.fwd.torch_op", hint="pip install nvidia-cudnn-frontend"
)
TORCH = Requirement("torch", ">=2.11", hint="install torch 2.11 or newer for CUDA")

WIDTHS: tuple[dict[str, Any], ...] = (
    {"when": {"arch": AMPERE_AND_LATER}, "head_dim": Range(8, 128, multiple_of=8)},
    {"when": {"arch": HOPPER}, "head_dim": Range(8, 256, multiple_of=8)},
)
COMMON: dict[str, Any] = {
    "dtype": HALF,
    "group": True,
    "scale": True,
    "lse": True,
    "grad": TRAINABLE_LSE,
    "misaligned": True,
}
BANDED: dict[str, Any] = {"causal": CAUSAL, "window": Window()}


def _rows(variants: tuple[dict[str, Any], ...]) -> tuple[Row, ...]:
    return tuple(row(**variant, **widths, lowered=SINKS) for variant in variants for widths in WIDTHS)


# What it gives for a query without keys is not written down. There may be some where, under a band, queries are more
# than keys, and where a packed sequence of one query has no key.
FRONTEND_ROWS = _rows(
    (
        {**COMMON, **BANDED, "family": "dense", "s_relation": ("equal", "one", "fewer"), "cross": True},
        {**COMMON, **BANDED, "family": "varlen", "s_relation": ("equal", "fewer"), "cross": True},
        {**COMMON, "family": "dense", "s_relation": LENGTHS, "cross": True},
    )
)
TORCH_ROWS = _rows(
    (
        {**COMMON, "family": "dense", "s_relation": LENGTHS, "cross": True},
        {**COMMON, "family": "dense", "s_relation": "equal", "causal": CAUSAL},
    )
)

CUDNN = BackendInfo(
    "cudnn",
    "cuda",
    (
        Provider(
            "cudnn-frontend",
            FRONTEND_ROWS,
            "polyattn_cuda.cudnn:Frontend",
            (CUDNN_FRONTEND,),
            defects=(CUDNN_LOW_LSE, CUDNN_PACKED_GAPS),
        ),
        Provider("torch", TORCH_ROWS, "polyattn_cuda.cudnn:Torch", (TORCH,), defects=(CUDNN_LOW_LSE,)),
    ),
    summary="cuDNN attention",
    priority=35,
    evidence="emulator",
    upstream="https://github.com/NVIDIA/cudnn-frontend",
    note="a plan is built for each new shape, on the host: not for batches whose lengths change with every call",
)
