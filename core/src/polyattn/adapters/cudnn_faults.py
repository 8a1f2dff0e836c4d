"""A known fault of cuDNN, whose kernels torch and vendors' packages bring. Imports no torch: records read this."""

from __future__ import annotations

from ..contract import Defect, NotEmpty, conditions

__all__ = ["has_low_lse_fault", "low_lse_defect"]

_HALF = ("float16", "bfloat16")


def low_lse_defect(families: tuple[str, ...], how: str) -> Defect:
    """Make the record of a fault of cuDNN's dense backward: NaN where an LSE is very low.

    Args:
        families: the families of calls that a backend sends there. how: how the backend goes around it, for users.

    Returns:
        A `Defect` for `BackendInfo.defects`. Nothing of torch is imported.
    """
    return Defect(
        "cuDNN",
        "its backward gives NaN for queries whose LSE is below -88: in dQ where S_k % 128 is 64, in dK and dV where "
        "there is one query and S_k % 64 is 0",
        "pytorch/pytorch#196678, cudnn-frontend#628 and #1072; cuDNN 9.19 on an H100",
        "mended",
        conditions(family=families, dtype=_HALF, grad=NotEmpty()),
        how=how,
    )


def has_low_lse_fault(s_q: int, s_k: int) -> bool:
    """Say whether calls of `s_q` queries and `s_k` keys meet the fault of `low_lse_defect`."""
    return s_k % 128 == 64 or (s_q == 1 and s_k % 64 == 0)
