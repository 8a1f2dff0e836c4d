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
    """The samples of each launch; all of them where one takes them. A compiler learns of the batch that it fits."""
    if batch * heads <= MOST:
        return [slice(None)]
    most = max(MOST // heads, 1)
    return [slice(first, min(first + most, batch)) for first in range(0, batch, most)]


def slice_samples(shared: Tensor | None, some: slice) -> Tensor | None:
    """Some samples of a tensor that all of them may share along an axis of one, or that is not there."""
    return shared if shared is None or shared.shape[0] == 1 else shared[some]
