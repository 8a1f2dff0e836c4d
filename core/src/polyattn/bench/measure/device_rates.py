"""This module measures what the device itself can do, before and after the timed calls: where both differ, the times
tell nothing.

`matmul` is an 8192^3 product in bfloat16; `copy` a copy in device memory, bytes read and written; `read` a kernel that
only reads and adds up, which is as fast as keys and values can come in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .clock import Clock

__all__ = ["UNITS", "Anchors"]

UNITS = {"matmul": "TFLOP/s", "copy": "GB/s", "read": "GB/s"}
_HEAT, _WINDOW = 0.3, 0.35
"""Seconds of products before they count, and of those that do: an idle device runs them some 15% faster for a tenth of
a second, until its power is governed, and that in steps of several percent."""
_STEADY, _LOOKS = 0.015, 5
"""It is warm where two looks in a row differ by at most so much; after so many it is taken as it is."""


class Anchors:
    """Looks at a device: each call gives its rates, in `UNITS`. On a CPU the sizes are small.

    All looks are at the same tensors, about 4.4 GiB on a GPU: nothing is asked of the driver or given back.
    """

    def __init__(self, clock: Clock) -> None:
        size, words = (8192, 2**29) if clock.on_gpu else (256, 2**20)
        self.clock = clock
        self._source = torch.randn(words, device=clock.device)
        self._target = torch.empty_like(self._source)
        self._factors = torch.randn(2, size, size, dtype=torch.bfloat16, device=clock.device)
        self._product = torch.empty_like(self._factors[0])
        self._read = _reading(self._source)

    def __call__(self) -> dict[str, float]:
        nbytes, size = self._source.numel() * self._source.itemsize, len(self._product)
        copy = self.clock.calls([lambda: self._target.copy_(self._source)]).seconds
        read = self.clock.calls([self._read]).seconds
        # Products last: what is timed after them finds the device warm.
        matmul = _settled(self.clock, lambda: torch.mm(*self._factors, out=self._product))
        rates = {"matmul": 2 * size**3 / matmul / 1e12, "copy": 2 * nbytes / copy / 1e9, "read": nbytes / read / 1e9}
        return {name: float(f"{rate:.5g}") for name, rate in rates.items()}


def _settled(clock: Clock, call: Callable[[], Tensor]) -> float:
    """Seconds of a call, once they have stopped to change: a device that was idle, or busy with something lighter, is
    not what it is in the middle of a run."""
    if not clock.on_gpu:
        return clock.calls([call]).seconds
    Clock(clock.device, _HEAT).calls([call])
    looks = Clock(clock.device, _WINDOW)
    before = looks.calls([call]).seconds
    for _ in range(_LOOKS - 1):
        after = looks.calls([call]).seconds
        if abs(after - before) <= _STEADY * max(after, before):
            return (before + after) / 2
        before = after
    return before


def _reading(source: Tensor) -> Callable[[], Tensor]:
    """Return what reads all of `source`: a kernel that does nothing else, or torch's sum on a CPU."""
    if source.device.type != "cuda":
        return source.sum
    from . import read_kernel

    sums = read_kernel.sums_of(source)
    read_kernel.read_all(source, sums)
    if not torch.allclose(sums, source.view(sums.numel(), -1).sum(-1), rtol=1e-3, atol=0.1):
        raise RuntimeError("the reading kernel does not read what is there; nothing is measured")

    def read() -> Tensor:
        read_kernel.read_all(source, sums)
        return sums

    return read
