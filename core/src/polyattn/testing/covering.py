"""Combinations of values in which every pair of values meets at least once (pairwise testing).

Faults of a kernel mostly come from one value or from two that meet. A covering of all pairs finds those with some tens
of combinations where the full product has millions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence

__all__ = ["covering"]

Values = dict[str, Hashable]
_Value = tuple[str, Hashable]
_Wanted = dict[int, int]
"""For the bit of each value of each axis, the bits of the values of other axes that it has not met yet."""


def covering(
    axes: Mapping[str, Sequence[Hashable]], repair: Callable[[Values], Values | None], count: int, seed: str
) -> list[Values]:
    """At most `count` combinations: first those that cover all pairs, then random ones around what is usual.

    Args:
        axes: name -> the values it may take, the usual one first.
        repair: makes a combination consistent, or says None; a pair that no repaired combination keeps is given up.
        count: how many are wanted; fewer come back when there are no more different ones.
        seed: the same seed gives the same combinations on every machine.
    """
    rng = random.Random(seed)
    # An axis of one value meets everything anyhow. It has no part in the draws, so that a field which only another
    # family has changes none of them.
    usual = {name: values[0] for name, values in axes.items() if len(set(values)) == 1}
    names = sorted(axes.keys() - usual.keys())
    # Each value of each axis is one bit: what meets what is then counted by whole words, not one by one.
    bits: dict[_Value, int] = {}
    own: dict[str, int] = {}
    for name in names:
        for value in axes[name]:
            bits.setdefault((name, value), 1 << len(bits))
        own[name] = sum({bits[name, value] for value in axes[name]})
    every = sum(own.values())
    wanted: _Wanted = {bit: every & ~own[name] for (name, _), bit in bits.items()}
    spelled = {bit: value for value, bit in bits.items()}
    pairs = [(bits[a, x], bits[b, y]) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]]
    choices = [(name, [bits[name, value] for value in axes[name]], own[name]) for name in names]
    found: list[Values] = []
    seen: set[tuple[_Value, ...]] = set()

    def keep(values: Values | None) -> None:
        if values is None:
            return
        met = [bit for name in names if (bit := bits.get((name, values[name]))) is not None]
        together = sum(met)
        for bit in met:
            wanted[bit] &= ~together
        combination = tuple(sorted(values.items(), key=lambda item: item[0]))
        if combination not in seen:
            seen.add(combination)
            found.append(values)

    rng.shuffle(pairs)
    for one, other in pairs:
        if len(found) >= count:
            return found
        if other & wanted[one]:
            keep(repair({**usual, **dict(spelled[bit] for bit in _grow(one, other, choices, wanted, rng))}))
            wanted[one] &= ~other
            wanted[other] &= ~one
    for _ in range(20 * count):
        if len(found) >= count:
            break
        drawn = {name: axes[name][0] if rng.random() < 0.5 else rng.choice(axes[name]) for name in names}
        keep(repair({**usual, **drawn}))
    return found


def _grow(
    one: int, other: int, choices: Sequence[tuple[str, list[int], int]], wanted: _Wanted, rng: random.Random
) -> list[int]:
    """Choose a value on the other axes too, each time one that meets most of what it has not met yet."""
    chosen, together = [one, other], one | other
    for _, values, own in rng.sample(choices, len(choices)):
        if not together & own:
            scores = [(together & wanted[bit]).bit_count() for bit in values]
            best = max(scores)
            bit = rng.choice([v for v, score in zip(values, scores, strict=True) if score == best])
            chosen.append(bit)
            together |= bit
    return chosen
