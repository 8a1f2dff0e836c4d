"""The cases of a method: calls with a place, at which it is compared with its own definition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..contract import Row
from .cases import Case, Placed
from .families import METHODS, PlacedCalls
from .problems import off_boundary
from .row_cases import holds_here, request_of
from .values import declared, inside

__all__ = ["placed_cases"]

_TRAINED = ("query", "key", "value")
_RUN = ((0, "cond"), (0, "uncond"), (1, "cond"))

_WAYS: tuple[Mapping[str, Any], ...] = (
    {"points": _RUN, "batch": 2},
    {"text": (3, 5), "valid_text": (2, 4), "group": 4, "scale": 1.5, "layout": "BHSD", "storage": "gapped"},
    {"text": (0, 5), "group": 4, "grad": _TRAINED},
    {"text": (7, 0), "storage": "misaligned", "out": "strided"},
    {"batch": 2, "layout": "BHSD", "grad": _TRAINED},
    {"graph_capture": True, "text": (2, 0)},
)
"""Each with the next options of a method. What a row or a method does not take is left out."""

_LONG = (9, 8, 16)
"""A grid of more tokens than a kernel reads at once. It has whole chunks of V-MoBA, and tiles that are not whole."""


def placed_cases(name: str, rows: Sequence[Row], facts: Mapping[str, Any], dtypes: Sequence[str]) -> list[Case]:
    """The cases of calls with a place. None of a backend that `METHODS` does not know. Arguments as `generate`."""
    known = METHODS.get(name)
    if known is None:
        return []
    found: dict[str, Case] = {}
    for row in rows:
        if "place" in row.when and holds_here(row, facts):
            for dtype in inside("dtype", row):
                if dtype in dtypes:
                    for case in _of_row(name, known, row, {**facts, "family": "dense", "dtype": dtype}):
                        found.setdefault(case.id, case)
    return list(found.values())


def _of_row(name: str, known: PlacedCalls, row: Row, fixed: Mapping[str, Any]) -> Iterator[Case]:
    for number, way in enumerate(_WAYS):
        options = known.choices[number % len(known.choices)]
        yield from _case(name, known, row, fixed, way, options, layer=number % 3)
    if known.dense is not None:
        yield from _case(name, known, row, fixed, {**_WAYS[0], "batch": 1}, known.dense, full=True)
    yield from _case(name, known, row, fixed, {}, known.choices[0], layer=2, grid=_LONG)


def _case(
    name: str,
    known: PlacedCalls,
    row: Row,
    fixed: Mapping[str, Any],
    way: Mapping[str, Any],
    options: Mapping[str, Any],
    **more: Any,
) -> Iterator[Case]:
    text = way.get("text", (0, 0)) if known.text else (0, 0)
    valid = way.get("valid_text") if known.text and known.padding else None
    points = way.get("points", Placed.points)
    placed = {"grid": known.grid, "text": text, "valid_text": valid, "points": points, **more}
    place = Placed(method=name, options=tuple(sorted(options.items())), **placed)
    asked = {field: way[field] for field in ("group", "scale", "grad", "graph_capture") if field in way}
    asked = {field: value for field, value in asked.items() if value in inside(field, row)}
    if "graph_capture" in way and "graph_capture" not in asked:
        return
    # The first is 64 where a row takes it.
    width, *_ = *inside("head_dim", row), 0
    asked |= {"head_dim": width, "place": True, "s_relation": "equal", "layout": way.get("layout", "BSHD")}
    request = request_of({**fixed, **asked})
    tokens = math.prod(place.grid) + sum(text)
    case = Case(
        request=request, lengths=((tokens, tokens),) * way.get("batch", 1), place=place,
        check="capture" if "graph_capture" in way else "values",
        storage=way.get("storage", "contiguous"), out=way.get("out", ""),
    )  # fmt: skip
    if off_boundary(case):
        case = dataclasses.replace(case, request=dataclasses.replace(request, misaligned=True))
    if declared([row], case.request.normalised()):
        yield case
