"""Scales as FlashInfer wants them."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from polyattn.errors import GraphError
from polyattn.placement import placed
from polyattn.records import AttentionRequest

__all__ = ["HostScale", "readable", "scale_of", "unscaled"]


def scale_of(request: AttentionRequest) -> tuple[float, float | None]:
    """(a scale above 0, what the queries are multiplied with instead, None = nothing). The kernels take the largest
    unscaled logit of a row before they scale: NaN for a scale of 0 or less (S2)."""
    scale = request.softmax_scale
    if scale > 0:
        return scale, None
    return (-scale, -1.0) if scale else (1.0, 0.0)


def readable(query: Tensor, factor: float | None) -> Tensor:
    """Queries as the kernels read them, times what `scale_of` says."""
    if factor is not None:
        query = query * factor
    # Whole ones, which nearly all are, without a look at each stride.
    return query if query.is_contiguous() and not query.data_ptr() & 15 else placed(query)


def unscaled(rows: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """New rows as a cache with this scale stores them, but for the rounding."""
    return rows if rows is None or scale is None else rows.float() / scale


class HostScale:
    """Scales of caches as host numbers, which the wrappers want. The device is asked once for each tensor: scales do
    not change while a cache is in use (S9)."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, float]] = {}

    def __call__(self, scale: Tensor | None) -> float | None:
        """
        Args:
            scale: one number, or None.

        Raises:
            GraphError: the number is not known, and a graph is being recorded.
        """
        if scale is None:
            return None
        version = 0 if scale.is_inference() else scale._version
        known = self._known.get(id(scale))
        if known is not None and known[0]() is scale and known[1] == version:
            return known[2]
        if scale.is_cuda and torch.cuda.is_current_stream_capturing():
            raise GraphError(
                "FlashInfer takes the scale of an FP8 cache as a host number, and reading this one would wait for the "
                "device while a CUDA graph is recorded: run the step once before it is recorded"
            )
        value = float(scale)
        self._known = {key: entry for key, entry in self._known.items() if entry[0]() is not None}
        self._known[id(scale)] = (weakref.ref(scale), version, value)
        return value
