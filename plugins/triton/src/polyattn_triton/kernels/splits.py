"""Which keys each program of a split attention reads, decided on the device from the lengths of the batch.

Work is cut into items: (sequence, range of keys). Their number is fixed by the host, as a graph needs it; how they are
shared out follows from the lengths, without the host knowing them: one long sequence among many short ones still
fills the chip. Batch-invariant splits follow from the sequence's own length instead, whatever else is in the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from polyattn_triton.kernels.rules import end_key, first_key  # before Triton: it decides how that is imported
from polyattn_triton.runtime import device_of

import triton  # isort: skip
import triton.language as tl  # isort: skip

__all__ = ["FIELDS", "MOST_RANGES", "Allocate", "Items", "Shape", "power_of_2", "ranges"]

FIELDS = tl.constexpr(8)
"""Numbers of an item: sequence (-1: nothing to do), its keys, its first query in the packed batch, its queries, the
range [begin, end) of keys, the first item of the sequence, how many items the sequence has."""

Allocate = Callable[[str, int], Tensor]
"""(name, bytes) -> uint8, as `polyattn.contract.Slot.workspace`."""

SHARES = tl.constexpr(16)
"""Parts of a sequence in batch-invariant splits, where they are neither as short nor as long as a part may be."""


MOST_RANGES = 32
"""Of the keys of a call in ranges: each leaves a part to be merged."""
_BESIDE, _MERGED, _PARTS, _GAIN = 1.5, 2.0, 8, 0.9
"""In blocks of keys: what a tile takes beside them, what merging takes, parts whose merging takes one more; and what
share of the time is worth the memory of parts. An estimate from the floors of an H100 (a block of 128 keys and rows
takes 1.9 us, a launch 4), not a measurement."""


@triton.jit(do_not_specialize=["count", "target", "left", "right", "chunk"])
def _share_out(
    items,
    counters,
    seq_lens,
    cu_seqlens_q,
    count,
    target,
    left,
    right,
    chunk,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    FINEST: tl.constexpr,
    FIXED: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
):
    """One program for each item. Every program looks at all sequences: cheaper than telling each other."""
    item = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    there = n < count
    s_k = tl.load(seq_lens + n, mask=there, other=0)
    start = tl.load(cu_seqlens_q + n, mask=there, other=0)
    queries = tl.load(cu_seqlens_q + n + 1, mask=there, other=0) - start
    # In blocks of BLOCK_N keys, those that some query of the sequence sees by position.
    low = tl.minimum(tl.maximum(first_key(s_k - queries, left, chunk, LEFT, CHUNK), 0), s_k) // BLOCK_N
    high = tl.where(queries > 0, tl.cdiv(tl.minimum(end_key(s_k - 1, s_k, right, RIGHT), s_k), BLOCK_N), 0)
    blocks = tl.maximum(high - low, 0)
    if FIXED:
        length = tl.minimum(tl.maximum(tl.cdiv(blocks, SHARES), FINEST), FIXED)
        parts = tl.cdiv(high, length) - low // length
    else:
        # One for each sequence, and the others by length.
        total = tl.maximum(tl.sum(blocks.to(tl.int64), 0), 1)
        parts = 1 + (blocks.to(tl.int64) * (target - count) // total).to(tl.int32)
        parts = tl.minimum(parts, blocks // LEAST)
    # A sequence without keys has an item too: somebody writes its zeros.
    parts = tl.where(there, tl.maximum(tl.where(blocks > 0, parts, 0), 1), 0)
    ends = tl.cumsum(parts, 0)
    sequence = tl.sum(tl.where(there & (ends <= item), 1, 0), 0)
    mine = n == sequence
    number = tl.sum(tl.where(mine, parts, 0), 0)
    first = tl.sum(tl.where(mine, ends - parts, 0), 0)
    first_block = tl.sum(tl.where(mine, low, 0), 0)
    own_blocks = tl.sum(tl.where(mine, blocks, 0), 0)
    part = item - first
    if FIXED:
        own = tl.maximum(tl.sum(tl.where(mine, length, 0), 0), 1)  # of an item too many there is no sequence
        begin = tl.maximum((first_block // own + part) * own, first_block)
        end = tl.minimum((first_block // own + part + 1) * own, first_block + own_blocks)
    else:
        whole = tl.maximum(number, 1)
        begin = first_block + (part.to(tl.int64) * own_blocks // whole).to(tl.int32)
        end = first_block + ((part + 1).to(tl.int64) * own_blocks // whole).to(tl.int32)
    at = items + item * FIELDS
    tl.store(at, tl.where(sequence < count, sequence, -1))
    tl.store(at + 1, tl.sum(tl.where(mine, s_k, 0), 0))
    tl.store(at + 2, tl.sum(tl.where(mine, start, 0), 0))
    tl.store(at + 3, tl.sum(tl.where(mine, queries, 0), 0))
    tl.store(at + 4, begin * BLOCK_N)
    tl.store(at + 5, end * BLOCK_N)
    tl.store(at + 6, first)
    tl.store(at + 7, number)
    if item < count:
        h = tl.arange(0, HEADS_BLOCK)
        tl.store(counters + item * HEADS + h, tl.zeros_like(h), mask=h < HEADS)


def power_of_2(n: int) -> int:
    """The next one. Triton's own takes 9 us, several times in a call."""
    return 1 << max(n - 1, 0).bit_length()


@functools.lru_cache(maxsize=4096)
def ranges(processors: int, tiles: int, blocks: int, unit: int) -> int:
    """Ranges of keys that each of so many tiles of rows is cut into so that a launch of extend, one program for a tile
    and a range, and the merging of its parts end soonest; 1: none. `unit`: blocks of a range, at least."""
    units = max(-(-blocks // unit), 1)

    def estimate(cuts: int) -> float:
        rounds = -(-tiles * cuts // processors)
        return rounds * (-(-units // cuts) * unit + _BESIDE) + (cuts > 1) * (_MERGED + cuts / _PARTS)

    best = min(range(1, min(units, MOST_RANGES) + 1), key=estimate, default=1)
    if estimate(best) > _GAIN * estimate(1):
        return 1
    # No more than the longest sequence fills.
    return -(-units // -(-units // best))


@dataclasses.dataclass(frozen=True)
class Shape:
    """What decides the sizes of `Items`: facts that the host has.

    Attributes:
        sequences: N. columns: programs of an item, KV heads times tiles of rows. rows: of a tile. width: D_v.
        max_seqlen_k: at least the longest sequence. block: keys of a block.
        target: items that planned splits make at most, no fewer than `sequences`. least: blocks of the shortest part.
        fixed: blocks of the shortest and of the longest part, each from its sequence alone; None = from the batch.
        window, chunk: of the request, causal as a right bound of 0; they decide which keys are read at all.
    """

    sequences: int
    columns: int
    rows: int
    width: int
    max_seqlen_k: int
    block: int
    target: int
    least: int
    fixed: tuple[int, int] | None
    window: tuple[int, int]
    chunk: int

    @property
    def items(self) -> int:
        """Items there may be."""
        blocks = -(-self.max_seqlen_k // self.block)
        if self.fixed:
            shortest, longest = self.fixed
            # A window need not start where a part does.
            most = max(-(-blocks // longest), SHARES.value + 1)
            return self.sequences * max(min(-(-blocks // shortest), most), 1)
        return min(self.target, self.sequences * max(blocks // self.least, 1))


class Items:
    """The items of a step with the memory of their partial results. `share_out` fills them in, on the device.

    Attributes:
        table: int32 [items, FIELDS]. counters: int32 [N, columns], zero between calls.
        outs: float32 [items, columns, rows, width]; lses: float32 [items, columns, rows], base 2.
    """

    def __init__(self, shape: Shape, allocate: Allocate) -> None:
        self.shape = shape
        count = shape.items
        cells = count * shape.columns * shape.rows if count > shape.sequences else 0
        sizes = {
            "items": 4 * count * FIELDS.value,
            "counters": 4 * shape.sequences * shape.columns,
            "outs": 4 * cells * shape.width,
            "lses": 4 * cells,
        }
        made = {name: allocate(name, max(size, 16))[:size] for name, size in sizes.items()}
        self.count = count
        self.table, self.counters = (made[name].view(torch.int32) for name in ("items", "counters"))
        self.outs, self.lses = (made[name].view(torch.float32) for name in ("outs", "lses"))

    def share_out(self, seq_lens: Tensor, cu_seqlens_q: Tensor) -> None:
        """One launch; it may be recorded."""
        shape = self.shape
        left, right = shape.window
        with device_of(seq_lens):
            _share_out[(self.count,)](
                self.table,
                self.counters,
                seq_lens,
                cu_seqlens_q,
                shape.sequences,
                shape.target,
                max(left, 0),
                max(right, 0),
                shape.chunk,
                BLOCK=power_of_2(shape.sequences),
                BLOCK_N=shape.block,
                LEAST=shape.least,
                FINEST=(shape.fixed or (0, 0))[0],
                FIXED=(shape.fixed or (0, 0))[1],
                LEFT=left >= 0,
                RIGHT=right >= 0,
                CHUNK=shape.chunk > 0,
                HEADS=shape.columns,
                HEADS_BLOCK=power_of_2(shape.columns),
                num_warps=4 if shape.sequences > 256 else 1,
            )
