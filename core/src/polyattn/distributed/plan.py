"""Who holds what: the tokens and heads of each rank before an exchange and after it. Host numbers only, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["ORDERS", "Heads", "Plan", "Span", "Split", "heads_of", "pieces_of", "splits", "visible"]

ORDERS = ("consecutive", "zigzag")
Span = tuple[int, int]
"""Positions [start, stop) in the whole sequence."""


class Heads(NamedTuple):
    """The heads of a rank of a Ulysses group: query heads [start, stop), and the key head that each entry of its keys
    has. `keys` are distinct, or one for each query head where groups of heads are cut unevenly."""

    start: int
    stop: int
    keys: tuple[int, ...]


class Split(NamedTuple):
    """Rows `queries` of a rank see the first `keys` rows of a block; causal: the last of them on a diagonal."""

    queries: Span
    keys: int
    causal: bool


def _cut(total: int, parts: int) -> list[int]:
    """Near-equal sizes, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def heads_of(query_heads: int, key_heads: int, ranks: int) -> tuple[Heads, ...]:
    """The heads of each rank. With fewer key heads than ranks, several have the same one."""
    group = query_heads // key_heads
    sizes = [n * group for n in _cut(key_heads, ranks)] if key_heads >= ranks else _cut(query_heads, ranks)
    found, start = [], 0
    for size in sizes:
        each = tuple(head // group for head in range(start, start + size))
        keys = tuple(dict.fromkeys(each))
        even = not keys or all(each.count(key) * len(keys) == size for key in keys)
        found.append(Heads(start, start + size, keys if even else each))
        start += size
    return tuple(found)


def pieces_of(lengths: Sequence[int], order: str) -> tuple[tuple[Span, ...], ...]:
    """The positions of the tokens of each rank of a ring, as it holds them.

    Args:
        lengths: tokens of each. order: consecutive; or zigzag: of 2 R pieces in order, rank r holds number r and number
            2 R - 1 - r, the first of which is the larger one by at most a token.
    """
    if order == "consecutive":
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        return tuple(((end - length, end),) for end, length in zip(ends, lengths, strict=True))
    first = [length - length // 2 for length in lengths]
    second = [length // 2 for length in lengths]
    ends = [sum(first[: i + 1]) for i in range(len(lengths))]
    total = sum(lengths)
    after = [total - sum(second[:i]) for i in range(len(lengths))]
    return tuple(((ends[i] - first[i], ends[i]), (after[i] - second[i], after[i])) for i in range(len(lengths)))


def balanced(total: int, ranks: int) -> tuple[tuple[Span, ...], ...]:
    """Zigzag pieces of a sequence: every rank has as much to do as the others where the mask is causal."""
    sizes = _cut(total, 2 * ranks)
    return pieces_of([sizes[i] + sizes[-1 - i] for i in range(ranks)], "zigzag")


def visible(queries: Sequence[Span], keys: Sequence[Span], *, causal: bool) -> list[Split]:
    """Which rows of a rank see which rows of a block.

    Args:
        queries, keys: their positions, increasing. Spans of both are the same or do not overlap.
    """
    tokens = sum(stop - start for start, stop in queries)
    total = sum(stop - start for start, stop in keys)
    if not tokens or not total:
        return []
    if not causal:
        return [Split((0, tokens), total, False)]
    if tuple(queries) == tuple(keys):
        return [Split((0, tokens), total, True)]
    found: list[Split] = []
    row = 0
    for start, stop in queries:
        seen = sum(end - begin for begin, end in keys if end <= start)
        rows = (row, row + stop - start)
        if found and found[-1].keys == seen and found[-1].queries[1] == row:
            found[-1] = Split((found[-1].queries[0], rows[1]), seen, False)
        elif seen and rows[0] != rows[1]:
            found.append(Split(rows, seen, False))
        row = rows[1]
    return found


def splits(held: Sequence[Span], wanted: Sequence[Span]) -> list[Span]:
    """Rows [start, stop) of what one rank holds that lie in what another wants, in order."""
    found, row = [], 0
    for start, stop in held:
        for low, high in wanted:
            a, b = max(start, low), min(stop, high)
            if a < b:
                found.append((row + a - start, row + b - start))
        row += stop - start
    return found


@dataclasses.dataclass(frozen=True)
class Plan:
    """A call of a layer, equal on all ranks of its mesh.

    Attributes:
        lengths: tokens of each rank, ring-major. heads: of each rank of a Ulysses group. held: the positions of the
            tokens of each Ulysses group, as they come. computed: as the ring computes them.
        batch, text: B and the tokens of the text.
    """

    lengths: tuple[int, ...]
    heads: tuple[Heads, ...]
    held: tuple[tuple[Span, ...], ...]
    computed: tuple[tuple[Span, ...], ...]
    batch: int
    query_heads: int
    key_heads: int
    text: int

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        ring: int,
        heads: tuple[int, int],
        batch: int,
        text: int,
        order: str,
        *,
        balance: bool,
    ) -> Plan:
        """The plan of a call.

        Args:
            ring: ranks of it. heads: of queries and of keys. balance: the ring computes in zigzag order.
        """
        ulysses = len(lengths) // ring
        groups = [sum(lengths[r * ulysses : (r + 1) * ulysses]) for r in range(ring)]
        held = pieces_of(groups, order)
        moved = balance and order == "consecutive" and ring > 1
        computed = balanced(sum(groups), ring) if moved else held
        split = heads_of(*heads, ulysses)
        return cls(tuple(lengths), split, held, computed, batch, *heads, text)

    def group(self, ring_index: int) -> tuple[int, ...]:
        """Tokens of each rank of a Ulysses group."""
        size = len(self.heads)
        return self.lengths[ring_index * size : (ring_index + 1) * size]

    @staticmethod
    def tokens(spans: Sequence[Span]) -> int:
        """Tokens in all of them."""
        return sum(stop - start for start, stop in spans)
