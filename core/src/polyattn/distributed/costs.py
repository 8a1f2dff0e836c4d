"""What a layer over ranks costs each of them: bytes that are sent, memory, and time by a simple model. No torch.

The model: kernels run at one rate; nothing hides what Ulysses exchanges, nor what a ring sends, since it takes
multiprocessors from the kernels; blocks that a ring copies are hidden as far as the kernel of a step lasts; the slowest
rank counts. Rates are those of H100 with NVLink, in bfloat16, unless others are given. It leaves out launches, which
short sequences wait for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .plan import heads_of

__all__ = ["Cost", "Machine", "Shape", "cost", "costs"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call: S tokens, T of text on all ranks. bytes: of a number. train: forward and backward."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    text: int = 0
    causal: bool = False
    train: bool = False
    bytes: int = 2


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates of a rank: TFLOP/s of a kernel forward and backward; GB/s that it sends within a host and between hosts,
    and that it copies in its own memory. copies: blocks of a ring are copied, `transfers="copy"` of a layer."""

    per_host: int = 8
    tflops: float = 690.0
    backward_tflops: float = 500.0
    within: float = 220.0
    between: float = 45.0
    memory: float = 3000.0
    copies: bool = False


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a rank, the most loaded one.

    Attributes:
        exchanged, passed: bytes that Ulysses and the ring send. held: bytes of the tensors of a call.
        kernel, waiting, copying: seconds in kernels, waiting for others, and in copies and merges.
        idle_heads: ranks of a Ulysses group without a head.
    """

    ring: int
    ulysses: int
    exchanged: float
    passed: float
    held: float
    kernel: float
    waiting: float
    copying: float
    idle_heads: int

    @property
    def time(self) -> float:
        """Seconds of a call."""
        return self.kernel + self.waiting + self.copying


def cost(shape: Shape, ring: int, ulysses: int, machine: Machine | None = None) -> Cost:
    """What a call costs on a mesh. Ranks of a Ulysses group are neighbours, of one host as far as it reaches."""
    machine = machine or Machine()
    heads = heads_of(shape.heads, shape.kv_heads, ulysses)
    h, k = max(one.stop - one.start for one in heads), max(len(one.keys) for one in heads)
    B, D, e = shape.batch, shape.head_dim, shape.bytes
    share, block = shape.tokens / (ring * ulysses), shape.tokens / ring
    away = (ulysses - 1) / ulysses

    # Queries and results leave for where their heads are, and keys for each rank that has one of their heads.
    one_way = B * share * D * e * (2 * shape.heads * away + 2 * k * (ulysses - 1))
    # To zigzag order and back, where a causal ring does not have it.
    moved = B * block * D * e * (2 * h + 2 * k) * (ring - 1) / ring if shape.causal else 0.0
    step_bytes = 2 * B * block * k * D * e
    exchanged = (one_way + moved) * (2 if shape.train else 1)
    # Backward keys and values go round again, and their gradients go home.
    passed = step_bytes * (ring - 1) * (3 if shape.train else 1)

    pairs = (shape.tokens + shape.text) ** 2 / (2 if shape.causal else 1) / ring
    forward = 4 * B * pairs * h * D / (machine.tflops * 1e12)
    backward = 10 * B * pairs * h * D / (machine.backward_tflops * 1e12) if shape.train else 0.0
    inner = machine.within if ulysses <= machine.per_host else machine.between
    outer = machine.within if ring * ulysses <= machine.per_host else machine.between
    waiting = exchanged / (inner * 1e9)
    for kernel, times in ((forward, 1), (backward, 2)):
        if kernel:
            hidden = kernel / ring if machine.copies else 0.0
            waiting += max(0.0, times * step_bytes / (outer * 1e9) - hidden) * (ring - 1)

    # Heads are put side by side and apart, three gradients for one result.
    whole = B * share * D * e * (2 * shape.heads + 2 * shape.kv_heads)
    copied = (2 * whole if ulysses > 1 else 0.0) * (3 if shape.train else 1)
    if ring > 1:
        # Parts are read and their sum is written; of more than four, every three are added to a sum in float32 before.
        # Gradients are added up in float32.
        parts = (ring + 1) * e + 8 * max(0, -(-(ring - 4) // 3))
        copied += B * block * h * D * parts
        if shape.train:
            copied += 2 * (2 + 3 * 4) * B * block * h * D * (ring - 1)
    copies = 2 if ulysses > 1 else 1
    held = copies * whole + 2 * B * D * e * shape.text * (h + k)
    held += 2 * step_bytes if ring > 1 else 0
    if shape.train:  # gradients of all of it, those of a ring in float32
        held += (
            B * D * (share * (2 * shape.heads + 2 * shape.kv_heads) * e + (block * (h + 2 * k) * 4 if ring > 1 else 0))
        )
    idle = sum(one.stop == one.start for one in heads)
    return Cost(
        ring, ulysses, exchanged, passed, held, forward + backward, waiting, copied / (machine.memory * 1e9), idle
    )


def costs(shape: Shape, devices: int, machine: Machine | None = None) -> list[Cost]:
    """Every mesh of so many devices, the fastest first; of two that are as fast, the one that sends less."""
    found = [cost(shape, devices // ulysses, ulysses, machine) for ulysses in _divisors(devices)]
    return sorted(found, key=lambda one: (round(one.time, 6), one.exchanged + one.passed))


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)
