"""Batches that one launch does not take: grids of GPUs end at 65,535 along their last axes, where kernels have samples
times heads, or samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MOST", "launch_slices", "slice_samples"]

MOST = 65_535
"""Samples times heads of one launch."""


def launch_slices(batch: int, heads: int) -> list[slice]:
    """Split a batch into launches of at most 65,535 samples times heads.

    Args:
        batch, heads: B and the heads that the kernel's grid multiplies it with (1 if it does not).

    Returns:
        A slice of samples for each launch; one slice of all if they fit.
    """
    if batch * heads <= MOST:
        return [slice(None)]
    most = max(MOST // heads, 1)
    return [slice(first, min(first + most, batch)) for first in range(0, batch, most)]


def slice_samples(shared: Tensor | None, some: slice) -> Tensor | None:
    """Take the samples `some` of the tensor `shared` [B, ...]. One of [1, ...] serves all samples; None stays None."""
    return shared if shared is None or shared.shape[0] == 1 else shared[some]
