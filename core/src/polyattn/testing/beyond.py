"""This module makes requests just outside a capability: the cases that a backend must refuse, with a reason."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from ..contract import AttentionRequest, Row
from .cases import Case
from .row_cases import RowCases, holds_here, request_of
from .values import CANDIDATES, candidates, declared, inside, unmet

__all__ = ["refusals"]

_NAMED_AS = {
    "head_dim": ("head_dim", "dims"),
    "v_head_dim": ("v_head_dim", "head_dim", "dims"),
    "window": ("window", "causal"),
    "causal": ("causal", "window"),
}
"""What a reason may call a field: pairs of widths are one limit, and (0, 0) is a causal window (normal form)."""


def refusals(
    rows: Sequence[Row], facts: Mapping[str, Any], *, families: Sequence[str], dtypes: Sequence[str], pairs: int = 60
) -> list[Case]:
    """The cases that a backend must refuse.

    Each value of each field that no row takes, families included, and at most `pairs` pairs of values for each row that
    rows take apart but not together. Arguments as `generate`.
    """
    found: dict[AttentionRequest, Case] = {}
    here = [row for row in rows if holds_here(row, facts)]
    served = {family: [row for row in here if family in inside("family", row)] for family in CANDIDATES["family"]}
    for family in families:
        if not served[family]:
            request = request_of({**facts, "family": family, "dtype": dtypes[0], "head_dim": 64})
            # Rows of the family that are for other machines say what of this one they are not for.
            elsewhere = any(family in inside("family", row) for row in rows)
            found[request] = Case(request=request, check="refusal", fields=tuple(facts) if elsewhere else ("family",))
        for row in served[family]:
            mine = [dtype for dtype in inside("dtype", row) if dtype in dtypes]
            if mine:
                asked = {**facts, "family": family, "dtype": mine[0], "place": "place" in row.when}
                for case in _beyond(row, rows, asked, pairs):
                    found.setdefault(case.request.normalised(), case)
    return list(found.values())


def _beyond(row: Row, rows: Sequence[Row], fixed: Mapping[str, Any], pairs: int) -> Iterator[Case]:
    maker = RowCases(row, "", fixed)
    if not maker.possible:
        # What a row takes by a rewrite alone has no case of its own to stand just outside of.
        return
    base = {**maker.base, **fixed}
    if "dims" in base:
        base["head_dim"], base["v_head_dim"] = base["dims"]
    usual = request_of(base).normalised()

    def case(**changes: Hashable) -> Case | None:
        request = request_of({**base, **changes})
        if declared(rows, request.normalised()):
            return None
        # A row that would take it but for one field may be what the reason speaks of.
        reasons = [[*itertools.islice(unmet(row, request.normalised()), 2)] for row in rows]
        others = (reason[0] for reason in reasons if len(reason) == 1)
        named = dict.fromkeys((*changes, *others))
        fields = tuple(dict.fromkeys(n for name in named for n in _NAMED_AS.get(name, (name,))))
        return Case(request=request, check="refusal", fields=fields)

    taken: list[tuple[str, Hashable]] = []
    for name in CANDIDATES:
        for value in candidates(name, rows) if name != "family" else ():
            if request_of({**base, name: value}).normalised() == usual:
                continue
            if refused := case(**{name: value}):
                yield refused
            else:
                taken.append((name, value))
    together = ({a: x, b: y} for (a, x), (b, y) in itertools.combinations(taken, 2) if a != b)
    refused_pairs = [refused for changes in together if (refused := case(**changes))]
    yield from random.Random(repr(usual)).sample(refused_pairs, min(pairs, len(refused_pairs)))
