"""Who holds what: every query meets every key that it sees once, whatever lengths, heads and orders."""

from __future__ import annotations

import itertools
import random

import pytest

from polyattn.distributed.plan import Plan, Span, heads_of, pieces_of, splits, visible


def positions(spans: tuple[Span, ...]) -> list[int]:
    return [p for start, stop in spans for p in range(start, stop)]


def plan(lengths: tuple[int, ...], order: str, *, balance: bool) -> Plan:
    return Plan.of(lengths, len(lengths), (4, 4), 1, 0, order, balance=balance)


LENGTHS = ((5, 3), (0, 4), (1, 0), (6, 3, 5, 4), (1, 0, 0, 0), (7, 7, 0, 2), (3,))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", ["consecutive", "zigzag"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_pair_is_computed_once(lengths: tuple[int, ...], order: str, causal: bool) -> None:
    found = plan(lengths, order, balance=causal)
    seen = []
    for queries, keys in itertools.product(found.computed, repeat=2):
        q, k = positions(queries), positions(keys)
        for (start, stop), reach, diagonal in visible(queries, keys, causal=causal):
            for i, j in itertools.product(range(start, stop), range(reach)):
                if not diagonal or j - reach <= i - stop:
                    seen.append((q[i], k[j]))
    total = sum(lengths)
    assert sorted(seen) == [(i, j) for i in range(total) for j in range(total) if not causal or j <= i]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_all_tokens_move_to_zigzag_order_and_back(lengths: tuple[int, ...]) -> None:
    found = plan(lengths, "consecutive", balance=True)
    assert sorted(p for spans in found.computed for p in positions(spans)) == list(range(sum(lengths)))
    moved: dict[int, list[int]] = {rank: [] for rank in range(len(lengths))}
    for source, (rank, target) in itertools.product(found.held, enumerate(found.computed)):
        rows = positions(source)
        moved[rank] += [rows[row] for span in splits(source, target) for row in range(*span)]
    assert all(moved[rank] == positions(spans) for rank, spans in enumerate(found.computed))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_balanced_causal_ring_gives_all_ranks_alike(ranks: int) -> None:
    found = plan((64,) * ranks, "consecutive", balance=True)
    work = []
    for queries in found.computed:
        parts = [visible(queries, keys, causal=True) for keys in found.computed]
        work.append(sum((b - a) * n - (d and (b - a) * (b - a - 1) // 2) for part in parts for (a, b), n, d in part))
    assert max(work) <= 1.02 * min(work)
    assert all(len(visible(q, k, causal=True)) == 1 for q, k in itertools.product(found.computed, repeat=2))


def test_zigzag_pieces_differ_by_a_token_at_most() -> None:
    assert pieces_of((4, 4), "zigzag") == (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    assert pieces_of((5, 3), "zigzag") == (((0, 3), (6, 8)), ((3, 5), (5, 6)))


def test_heads_go_with_their_keys() -> None:
    draw = random.Random(0)
    for _ in range(200):
        keys, group, ranks = draw.randint(1, 9), draw.randint(1, 5), draw.randint(1, 9)
        found = heads_of(keys * group, keys, ranks)
        assert [head for one in found for head in range(one.start, one.stop)] == list(range(keys * group))
        sizes = [one.stop - one.start for one in found]
        assert max(sizes) - min(sizes) <= (group if keys >= ranks else 1)
        for one, size in zip(found, sizes, strict=True):
            if size:  # the kernel's own rule of groups leads to the key head that the query has
                own = size // len(one.keys)
                assert [one.keys[i // own] for i in range(size)] == [(one.start + i) // group for i in range(size)]
