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
_Wanted = dict[_Value, set[_Value]]
"""For each value of each axis, the values of other axes that it has not met yet."""


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
    names = sorted(axes)
    pairs = [((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]]
    wanted: _Wanted = {(name, value): set() for name in names for value in axes[name]}
    for one, other in pairs:
        wanted[one].add(other)
        wanted[other].add(one)
    found: list[Values] = []
    seen: set[tuple[_Value, ...]] = set()

    def keep(values: Values | None) -> None:
        if values is None:
            return
        met = {(name, values[name]) for name in names}
        for value in met & wanted.keys():
            wanted[value] -= met
        combination = tuple(sorted(values.items(), key=lambda item: item[0]))
        if combination not in seen:
            seen.add(combination)
            found.append(values)

    rng.shuffle(pairs)
    for one, other in pairs:
        if len(found) >= count:
            return found
        if other in wanted[one]:
            keep(repair(_grow({one, other}, names, axes, wanted, rng)))
            wanted[one].discard(other)
            wanted[other].discard(one)
    for _ in range(20 * count):
        if len(found) >= count:
            break
        keep(repair({name: axes[name][0] if rng.random() < 0.5 else rng.choice(axes[name]) for name in names}))
    return found


def _grow(
    chosen: set[_Value], names: list[str], axes: Mapping[str, Sequence[Hashable]], wanted: _Wanted, rng: random.Random
) -> Values:
    """Choose a value on the other axes too, each time one that meets most of what it has not met yet."""
    fixed = {name for name, _ in chosen}
    for name in rng.sample(names, len(names)):
        if name not in fixed:
            scores = [len(chosen & wanted[name, value]) for value in axes[name]]
            best = max(scores)
            chosen.add((name, rng.choice([v for v, score in zip(axes[name], scores, strict=True) if score == best])))
    return dict(chosen)
