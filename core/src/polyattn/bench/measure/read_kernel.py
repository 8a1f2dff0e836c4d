"""A Triton kernel that only reads."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton import language as tl

__all__ = ["read_all", "sums_of"]

_BLOCK, _STEPS = 4096, 4


@triton.jit  # type: ignore[untyped-decorator]
def _read(source, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton 3.6 runs them
    """Add up STEPS blocks in each program, all of them loaded before the first is needed."""
    program = tl.program_id(0)
    first = program.to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        total += tl.load(source + first + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + program, tl.sum(total))


def sums_of(source: Tensor) -> Tensor:
    """Room for the sums of a float32 [N * 16384]."""
    return source.new_empty(source.numel() // (_BLOCK * _STEPS))


def read_all(source: Tensor, sums: Tensor) -> None:
    """The sum of each run of 16384 numbers of `source` into `sums`, float32 [N]."""
    _read[(sums.numel(),)](source, sums, BLOCK=_BLOCK, STEPS=_STEPS, num_warps=8)
