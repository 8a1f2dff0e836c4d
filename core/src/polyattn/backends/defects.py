"""Known faults of the kernels that torch brings, with what is done about each.

No torch import: records read this.
"""

from __future__ import annotations

from ..adapters import low_lse_defect
from ..contract import Defect, NotEmpty, conditions

__all__ = ["CUDA", "MPS", "VARLEN"]

_HALF = ("float16", "bfloat16")


CUDA = (
    # Of a packed batch each sequence is a dense call.
    low_lse_defect(("dense", "varlen"), "calls of these lengths that want gradients go to another of torch's kernels"),
    Defect(
        "torch",
        "some fused kernels load 16 bytes at a time from rows that do not begin at such a boundary, and give wrong "
        "numbers or a CUDA error",
        "pytorch/pytorch#183484 and #170813; torch 2.11 on an H100",
        "mended",
        conditions(misaligned=True),
        how="such tensors are copied",
    ),
    Defect(
        "torch",
        "the gradients of its fused kernel for float32 are wrong for keys and values that are expanded",
        "torch 2.11 on an H100: polyattn conform torch_sdpa --dtypes float32 of a version that handed them on",
        "mended",
        conditions(family="dense", dtype="float32", grad=NotEmpty()),
        how="expanded inputs of calls that want gradients are copied",
    ),
    Defect(
        "torch",
        "its fused kernel for float32 refuses strides that are not of whole 16 bytes, of axes of one too",
        "torch 2.11 on an H100: cutlassF: no kernel found to launch",
        "mended",
        conditions(family="dense", dtype="float32"),
        how="axes of one are given the strides of a dense tensor",
    ),
    Defect(
        "torch",
        "its memory-efficient kernel takes the heads of one causal query for more queries where keys are expanded",
        "torch 2.11 on an H100 and an H200: polyattn conform torch_native --dtypes float32 of a version before",
        "mended",
        conditions(family=("dense", "varlen"), causal="top_left", s_relation=("one", "fewer")),
        how="such a query is given the first key alone, the only one that it sees",
    ),
)
VARLEN = Defect(
    "torch",
    "the FlashAttention 2 in it writes the LSE of a block of queries over pages that sees no key to other memory",
    "Dao-AILab/flash-attention#2842",
    "undeclared",
    conditions(family="paged", s_relation="more"),
)
MPS = (
    Defect(
        "torch",
        "its causal flag lets future tokens through in half precision",
        "pytorch/pytorch#195910",
        "mended",
        conditions(dtype=_HALF, causal=("bottom_right", "top_left")),
        how="the mask is spelled out",
    ),
    Defect(
        "torch",
        "values are taken for as wide as keys",
        "pytorch/pytorch#176767",
        "mended",
        conditions(same_dims=False),
        versions="<2.12",
        how="the narrower ones are padded",
    ),
    Defect(
        "torch",
        "its kernel for few queries mistakes the place of a mask that heads or samples share",
        "pytorch/pytorch#184180",
        "mended",
        conditions(mask=("bool", "additive")),
        how="the mask is copied for each of them",
    ),
)
