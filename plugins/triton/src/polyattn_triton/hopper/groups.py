"""Lists of key blocks that start anywhere, as lists of groups of 16 keys that lie together.

A kernel that loads whole groups needs to mask only the groups that have fewer keys: they come last. Fours of groups of
one block come first, as a single copy can bring them.
"""

from __future__ import annotations

import torch

from polyattn_triton import runtime  # first: it decides how Triton is imported
from polyattn_triton.kernels.block_sparse import Lists, head_at

import triton  # isort: skip
import triton.language as tl  # isort: skip

__all__ = ["GROUP", "grouped"]

GROUP = tl.constexpr(16)
"""Keys of a group."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _next(at):
    """The first beginning of a group that is not before a token of a run."""
    return (at + 15) // 16 * 16


@triton.jit
def _of(entries, starts, valid, i, low, high, first_key, end_key):
    """Where the blocks of some entries start, and how many keys they have; none for entries out of range, and for those
    of blocks that start elsewhere than from first_key to end_key."""
    there = (i >= low) & (i < high)
    number = tl.load(entries + i, mask=there, other=0)
    start = tl.load(starts + number, mask=there, other=-1)
    there = (start >= first_key) & (start < end_key)
    return tl.where(there, start, -1), tl.load(valid + number, mask=there, other=0)


@triton.jit(do_not_specialize=["c_b", "c_h", "i_b", "i_h", "i_q", "p_b", "p_h", "room", "first_key", "end_key"])
def _grouped(
    counts, indices, starts, valid, numbers, groups, c_b, c_h, i_b, i_h, i_q, p_b, p_h, room, first_key, end_key,
    SHARED: tl.constexpr, MOST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The groups of one list, `start * 32 + keys`: fours of a block, other whole ones, and those with fewer keys; and
    how many there are in all, are whole, and are in fours.

    SHARED: heads of lists to a head of keys. MOST: groups of a block.
    """
    block, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    listed = tl.load(head_at(counts, b, head, c_b, c_h) + block)
    entries = head_at(indices, b, head, i_b, i_h) + block.to(tl.int64) * i_q
    starts = head_at(starts, b, head // SHARED, p_b, p_h)
    valid = head_at(valid, b, head // SHARED, p_b, p_h)
    row = (b.to(tl.int64) * tl.num_programs(1) + head) * tl.num_programs(0) + block
    found = groups + row * room
    count = block * 0
    for part in tl.static_range(3):
        for first in range(0, listed, WIDE):
            i = first + tl.arange(0, WIDE)
            start, size = _of(entries, starts, valid, i, first, listed, first_key, end_key)
            end = start + size
            before, held = _of(entries, starts, valid, i - 1, first, listed, first_key, end_key)
            before += held
            stop = tl.minimum(listed, first + WIDE)
            after, _ = _of(entries, starts, valid, i + 1, first, stop, first_key, end_key)
            # Blocks that follow each other in the list and in memory are one run. Lists that do not ascend have none.
            falls = tl.min(tl.where((i > first) & (i < listed), start - before, 0), 0) < 0
            begins = (start != before) | (i == first) | falls
            ends = (after != end) | (i + 1 >= tl.minimum(listed, first + WIDE)) | falls
            run = tl.where(begins, start, -1)
            last = tl.where(ends & (i < listed), end, 2147483647)
            if falls == 0:
                run = tl.associative_scan(run, 0, _larger)
                last = tl.associative_scan(last, 0, _smaller, reverse=True)
            low, high, total = start - run, end - run, last - run
            size = tl.where(i < listed, size, 0)
            high = tl.where(size > 0, high, low)
            # Groups begin at each 16th token of a run; four of them are one copy where they are all whole.
            whole_fours, whole = total // 64 * 64, total // 16 * 16
            STEP: tl.constexpr = 64 if part == 0 else 16
            if part == 0:
                begin, stop = (low + 63) // 64 * 64, tl.minimum(high, whole_fours)
            elif part == 1:
                begin, stop = _next(tl.maximum(low, whole_fours)), tl.minimum(high, whole)
            else:
                begin, stop = _next(tl.maximum(low, whole)), tl.minimum(high, total)
            number = tl.maximum(stop - begin + STEP - 1, 0) // STEP * (STEP // 16)
            place = count + tl.cumsum(number, 0) - number
            for g in tl.static_range(MOST):
                at = begin + g * 16
                keys = tl.minimum(total - at, 16)
                tl.store(found + place + g, (run + at) * 32 + keys, mask=g < number)
            count += tl.sum(number, 0)
        # In all at the end, whole ones before the last part, fours before the second.
        tl.store(numbers + 3 * row + (2 - part), count)


def grouped(lists: Lists, heads: int, kv_heads: int, keys: int, within: tuple[int, int] | None = None) -> Lists:
    """Lists of groups for lists of blocks with starts.

    Args:
        lists: with starts, and fewer than 2**26 keys. heads, kv_heads: of queries and keys. keys: S_k.
        within: of the blocks that start from one key to before another; None = of all.

    Returns:
        Lists whose indices [B', H', nQ, room] are `start * 32 + keys` of groups, and whose counts [B', H', nQ, 3] say
        how many there are, are whole, and are in fours; without starts and valid sizes.
    """
    starts, valid = lists.starts, lists.valid
    assert starts is not None
    assert valid is not None
    B, H = (max(t.shape[axis] for t in (lists.counts, lists.indices, starts)) for axis in (0, 1))
    if starts.shape[1] > 1:
        H = heads
    blocks, most = lists.counts.shape[2], -(-lists.block_k // GROUP.value)
    # No key is in two blocks: there are no more whole groups than keys have, and a block ends in one other at most.
    entries = max(lists.indices.shape[3], 1)
    room = min(entries * most, keys // GROUP.value + entries)
    groups = torch.empty(B, H, blocks, room, dtype=torch.int32, device=starts.device)
    counts = torch.empty(B, H, blocks, 3, dtype=torch.int32, device=starts.device)
    with runtime.device_of(starts):
        _grouped[blocks, H, B](
            lists.counts, lists.indices, starts, valid, counts, groups, *lists.strides(), *lists.places(), room,
            *(within or (0, keys + 1)), SHARED=heads // kv_heads if starts.shape[1] > 1 else 1, MOST=most, WIDE=128,
            num_warps=1,
        )  # fmt: skip
    return lists._replace(counts=counts, indices=groups, valid=None, starts=None)
