"""Scales as FlashInfer wants them, and queries times them where its kernels can read them."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from polyattn.adapters import align16
from polyattn.contract import AttentionRequest, GraphError

from ..tma import for_tma

__all__ = ["REACH", "HostScale", "loadable", "prepared", "readable", "scale_of", "unscaled"]

REACH = 1 << 32
"""Elements from the first row of queries, or of outputs, that the fa2 template reaches: `q_indptr * q_stride_n` and
`o_indptr * o_stride_n` are uint32 in prefill.cuh."""


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
    return query if query.is_contiguous() and not query.data_ptr() & 15 else align16(query)


def prepared(query: Tensor, factor: float | None, strides: tuple[int, ...]) -> Tensor:
    """As `readable`, for the plan-and-run wrappers: see `loadable`.

    Args:
        query: [T, H, D]. strides: of such queries without gaps. A contiguous tensor may have others, in an axis of one.
    """
    if factor is not None:
        query = query * factor
    return query if query.stride() == strides and not query.data_ptr() & 15 else loadable(query)


def loadable(rows: Tensor) -> Tensor:
    """`rows` [T, H, D], copied unless all templates can read them: fa3 does so by TMA, and fa2 counts in 32 bits."""
    near = rows.shape[0] * rows.stride(0) <= REACH
    return for_tma(rows) if near else rows.clone(memory_format=torch.contiguous_format)


def unscaled(rows: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """New rows as a cache with this scale stores them, but for the rounding."""
    return rows if rows is None or scale is None else rows.float() / scale


class HostScale:
    """Scales of caches as host numbers, which the wrappers want. The device is asked once for each tensor: scales do
    not change while a cache is in use (S9)."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, float]] = {}
        self._writing = threading.Lock()

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
        with self._writing:  # one adapter serves all threads
            gone = [key for key, entry in self._known.items() if entry[0]() is None]
            for key in gone:
                del self._known[key]
            self._known[id(scale)] = (weakref.ref(scale), version, value)
        return value
