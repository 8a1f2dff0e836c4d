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
_Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]


def covering(
    axes: Mapping[str, Sequence[Hashable]], repair: Callable[[Values], Values | None], count: int, seed: str
) -> list[Values]:
    """At most `count` combinations: first a covering of all pairs, most new pairs first, then random ones.

    Args:
        axes: name -> the values it may take.
        repair: makes a combination consistent, or says None; a pair that no repaired combination keeps is given up.
        count: how many are wanted; fewer come back when there are no more different ones.
        seed: the same seed gives the same combinations on every machine.
    """
    rng = random.Random(seed)
    names = sorted(axes)
    wanted: set[_Pair] = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]
    }
    found: list[Values] = []
    seen: set[tuple[tuple[str, Hashable], ...]] = set()

    def keep(values: Values | None) -> bool:
        if values is None:
            return False
        combination = tuple(sorted(values.items(), key=lambda item: item[0]))
        wanted.difference_update(itertools.combinations(combination, 2))
        if combination in seen:
            return False
        seen.add(combination)
        found.append(values)
        return True

    # Sets of strings are ordered by a hash that differs between processes: order must not come from them.
    order = sorted(wanted, key=repr)
    rng.shuffle(order)
    for pair in order:
        if len(found) >= count:
            return found
        if pair in wanted:
            keep(repair(_grow(dict(pair), names, axes, wanted, rng)))
            wanted.discard(pair)
    for _ in range(20 * count):
        if len(found) >= count:
            break
        keep(repair({name: rng.choice(axes[name]) for name in names}))
    return found


def _grow(
    values: Values, names: list[str], axes: Mapping[str, Sequence[Hashable]], wanted: set[_Pair], rng: random.Random
) -> Values:
    """Fill the other axes, each with the value that meets most pairs still wanted."""
    for name in rng.sample(names, len(names)):
        if name in values:
            continue
        scores = [sum(_pair(name, value, other, values[other]) in wanted for other in values) for value in axes[name]]
        best = max(scores)
        values[name] = rng.choice([v for v, score in zip(axes[name], scores, strict=True) if score == best])
    return values


def _pair(a: str, x: Hashable, b: str, y: Hashable) -> _Pair:
    return ((a, x), (b, y)) if a < b else ((b, y), (a, x))
