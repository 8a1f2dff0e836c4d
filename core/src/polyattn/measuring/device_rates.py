"""What the device itself can do, measured at both ends of every part of a run: a part whose ends differ tells nothing.

`matmul` is an 8192^3 product in bfloat16; `copy` a copy in device memory, bytes read and written; `read` a kernel that
only reads and adds up, which is as fast as keys and values can come in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .clock import Clock

__all__ = ["UNITS", "anchors"]

UNITS = {"matmul": "TFLOP/s", "copy": "GB/s", "read": "GB/s"}


def anchors(clock: Clock) -> dict[str, float]:
    """Rates, in `UNITS`. On a CPU the sizes are small."""
    size, words = (8192, 2**29) if clock.on_gpu else (256, 2**20)
    left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device=clock.device)
    out = torch.empty_like(left)
    # The longest first: clocks and temperature settle in it.
    clock.calls([lambda: torch.mm(left, right, out=out)])
    matmul = clock.calls([lambda: torch.mm(left, right, out=out)]).seconds
    source = torch.randn(words, device=clock.device)
    target = torch.empty_like(source)
    copy = clock.calls([lambda: target.copy_(source)]).seconds
    read = clock.calls([_reading(source)]).seconds
    nbytes = source.numel() * source.itemsize
    rates = {"matmul": 2 * size**3 / matmul / 1e12, "copy": 2 * nbytes / copy / 1e9, "read": nbytes / read / 1e9}
    return {name: float(f"{rate:.5g}") for name, rate in rates.items()}


def _reading(source: Tensor) -> Callable[[], Tensor]:
    """What reads all of `source`: a kernel that does nothing else, or torch's sum on a CPU."""
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
