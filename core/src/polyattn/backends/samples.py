"""Batches that one launch does not take: grids of GPUs end at 65,535 along their last axes, where kernels have samples
times heads, or samples.
"""

from __future__ import annotations

__all__ = ["MOST", "parts_of"]

MOST = 65_535
"""Samples times heads of one launch."""


def parts_of(batch: int, heads: int) -> list[slice]:
    """The samples of each launch; all of them where one takes them."""
    most = max(MOST // max(heads, 1), 1)
    return [slice(first, min(first + most, batch)) for first in range(0, batch, most)] or [slice(0, 0)]
