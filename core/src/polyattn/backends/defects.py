"""Known faults of the kernels that torch brings, with what is done about each, and where cuDNN's backward has one.

No torch import: records read this.
"""

from __future__ import annotations

from ..contract import Defect, NotEmpty, conditions

__all__ = ["CUDA", "MPS", "VARLEN", "low_lse", "low_lse_at"]

_HALF = ("float16", "bfloat16")


def low_lse(families: tuple[str, ...], how: str) -> Defect:
    """The fault of cuDNN's dense backward where an LSE is very low, and how a backend goes around it."""
    return Defect(
        "cuDNN",
        "its backward gives NaN for queries whose LSE is below -88: in dQ where S_k % 128 is 64, in dK and dV where "
        "there is one query and S_k % 64 is 0",
        "pytorch/pytorch#196678, cudnn-frontend#628 and #1072; cuDNN 9.19 on an H100",
        "mended",
        conditions(family=families, dtype=_HALF, grad=NotEmpty()),
        how=how,
    )


def low_lse_at(s_q: int, s_k: int) -> bool:
    """Whether `low_lse` is a fault of calls of these lengths."""
    return s_k % 128 == 64 or (s_q == 1 and s_k % 64 == 0)


CUDA = (
    # Of a packed batch each sequence is a dense call.
    low_lse(("dense", "varlen"), "calls of these lengths that want gradients go to another of torch's kernels"),
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
