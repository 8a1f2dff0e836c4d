"""What the device itself can do, measured at both ends of every part of a run: a part whose ends differ tells nothing.

`matmul` is an 8192^3 product in bfloat16; `copy` a copy in device memory, bytes read and written; `read` a kernel that
only reads and adds up, which is as fast as keys and values can come in.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from .clock import Timer

__all__ = ["anchors", "read_all"]

_BLOCK, _STEPS = 4096, 4


@triton.jit
def _read(source, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Each program adds up STEPS blocks, all of them loaded before the first is needed."""
    program = tl.program_id(0)
    first = program.to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        total += tl.load(source + first + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + program, tl.sum(total))


def read_all(source: Tensor, sums: Tensor) -> None:
    """The sum of each run of 16384 numbers of `source`, float32 [N * 16384], into `sums`, float32 [N]."""
    _read[(sums.numel(),)](source, sums, BLOCK=_BLOCK, STEPS=_STEPS, num_warps=8)


def anchors(timer: Timer) -> dict[str, float]:
    """Rates, in the units of `verdicts.ANCHORS`."""
    size, words = (8192, 2**29) if timer.on_gpu else (64, _BLOCK * _STEPS * 2)
    left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device=timer.device)
    out = torch.empty_like(left)
    # The longest first: clocks and temperature settle in it.
    timer.calls([lambda: torch.mm(left, right, out=out)])
    matmul = timer.calls([lambda: torch.mm(left, right, out=out)]).seconds
    source = torch.randn(words, device=timer.device)
    target, sums = torch.empty_like(source), torch.empty(words // (_BLOCK * _STEPS), device=timer.device)
    copy = timer.calls([lambda: target.copy_(source)]).seconds
    read = timer.calls([lambda: read_all(source, sums)]).seconds
    wanted = source.view(-1, _BLOCK * _STEPS).sum(-1)
    if not torch.allclose(sums, wanted, rtol=1e-3, atol=0.1):
        raise RuntimeError("the reading kernel does not read what is there; nothing is measured")
    nbytes = source.numel() * source.itemsize
    rates = {"matmul": 2 * size**3 / matmul / 1e12, "copy": 2 * nbytes / copy / 1e9, "read": nbytes / read / 1e9}
    return {name: float(f"{rate:.5g}") for name, rate in rates.items()}
