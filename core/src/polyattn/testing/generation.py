"""This module makes the cases that a backend must serve from its capability rows: everything that is declared is
tried."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ..contract import Row
from .cases import Case
from .families import FAMILIES, METHODS
from .long_cases import LongCases, brief, far, one_far, wide
from .row_cases import RowCases, holds_here
from .values import inside

__all__ = ["LEVELS", "TILES", "Level", "generate", "left_out"]

Level = Literal["quick", "full"]
LEVELS: Mapping[Level, int] = {"quick": 50, "full": 500}
"""Cases of combined fields for each capability row and dtype. 80 cover nearly all pairs of values."""

TILES: Mapping[Level, int] = {"quick": 11, "full": 100}
"""Cases of several tiles for each capability row and dtype: each value once, or pairs of them too."""

ONE = 1


def generate(
    rows: Sequence[Row],
    facts: Mapping[str, Any],
    *,
    families: Sequence[str],
    dtypes: Sequence[str],
    per_row: int,
    tiles: int = ONE,
) -> list[Case]:
    """The cases that a backend must serve.

    Args:
        rows: its capability. facts: the machine as request fields (platform, arch, toolkit, features).
        families, dtypes: those to look at. per_row: cases of combined fields for each row and dtype.
        tiles: cases of several tiles for each row and dtype; `ONE`: of each family a single one, no longer than what
            can be interpreted.
    """
    found: dict[str, Case] = {}
    tried: set[Hashable] = set()
    grids: set[Hashable] = set()
    for index, row in enumerate(rows):
        for family, dtype in itertools.product(inside("family", row), inside("dtype", row)):
            if family not in families or dtype not in dtypes or not holds_here(row, facts):
                continue
            maker = RowCases(row, f"{family} {dtype} {index}", {**facts, "family": family, "dtype": dtype})
            if not maker.possible:
                continue
            # Where programs are compiled one by one, relations are few too.
            relations = itertools.islice(maker.relations(), None if per_row >= 40 else 3)
            longer: Iterable[Case] = ()
            if tiles > ONE and maker.family.long:
                longer = _longer(maker, tiles, few=tiles <= TILES["quick"])
                if (family, index) not in grids:
                    longer = itertools.chain(longer, wide(maker))
                    grids.add((family, index))
            elif maker.family.long and family not in tried and (longer := [*brief(maker), *one_far(maker)]):
                tried.add(family)
            for case in itertools.chain(maker.combined(per_row), maker.alone(), relations, longer):
                found.setdefault(case.id, case)
    return list(found.values())


def _longer(maker: RowCases, tiles: int, *, few: bool) -> Iterator[Case]:
    # First what all runs have: a quick one of a backend that compiles has nothing else.
    yield from [*brief(maker), *one_far(maker)]
    yield from far(maker, few=few)
    longer = LongCases(maker.row, maker.seed, maker.fixed)
    if longer.possible:
        yield from longer.cases(tiles)


def left_out(rows: Sequence[Row], facts: Mapping[str, Any], families: Sequence[str], name: str = "") -> list[str]:
    """Return what rows take and no case tries, each as a sentence: the kit can make no tensors for it. `name`: of
    the backend."""
    found: dict[str, None] = {}
    for row in rows:
        for family in inside("family", row):
            if family not in families or not holds_here(row, facts):
                continue
            if "place" in row.when:
                known = METHODS.get(name)
                nobody = f"calls with a place: the kit does not know the mathematics of {name or 'the method'}"
                found |= dict.fromkeys((nobody,) if known is None else known.untried)
                continue
            if family not in FAMILIES:
                found[f"family {family}: the kit judges it and does not compute it"] = None
                continue
            if True in inside("large", row):
                found["large: a tensor of 2**31 elements does not fit a test"] = None
            for name, values in FAMILIES[family].unmade.items():
                taken = [str(value) for value in inside(name, row) if value in values]
                if taken:
                    found[f"{family} with {name}={' or '.join(taken)}: the kit makes no such tensors"] = None
    return list(found)
