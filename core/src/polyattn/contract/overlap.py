"""Do tensors overlap in memory? No output may overlap an input."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["shares_memory"]


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors start at one place or, where both are contiguous, overlap at all."""
    if not a.numel() or not b.numel():
        return False
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if start_a == start_b or not (a.is_contiguous() and b.is_contiguous()):
        return start_a == start_b
    return start_a < start_b + b.nbytes and start_b < start_a + a.nbytes
