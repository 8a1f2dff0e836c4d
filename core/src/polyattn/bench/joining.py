"""Parts of one run, measured by several processes, each on a device of its own, as one result."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import results
from .bars import ANCHORS_WITHIN, difference
from .sheets import Sheet

__all__ = ["joined", "read_parts"]


def read_parts(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Result files, by their places.

    Raises:
        ConfigError: one of them is named twice, cannot be read, or is no result.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        if str(path) in found:
            raise ConfigError(f"--join {path} is named twice: every part of a run once")
        found[str(path)] = results.load(path)
    return found


def joined(parts: Mapping[str, Mapping[str, Any]], sheet: Sheet) -> dict[str, Any]:
    """The parts as one result, in the order of the sheets, with verdicts over all of their rows.

    Every row keeps the anchors that it was measured between. The parts' own are compared too: where the rate of one is
    more than `ANCHORS_WITHIN` from that of the part in the middle, what that rate bounds there counts as not accepted.

    Args:
        parts: result files by their places. sheet: what all of them measured.

    Raises:
        ConfigError: they are not of one run: another device, other versions, settings or sheets; or a row that two of
            them accepted.
    """
    (first, head), *others = parts.items()
    for name in (*results.SAME, "sheets"):
        for place, part in others:
            if part.get(name) != head.get(name):
                said = results.difference_of(head.get(name), part.get(name), (f"in {first}", f"in {place}"))
                raise ConfigError(f"--join: {name} differs: {said}. Only parts of one run are joined")
    if head["sheets"] != dict(sheet.digests):
        said = results.difference_of(head["sheets"], dict(sheet.digests), (f"in {first}", "here"))
        raise ConfigError(f"--join: the sheets are not those that were measured: {said}. Name these, or measure again")
    rates = {place: _rates(part) for place, part in parts.items()}
    rows = _rows({place: _held(part, _apart(place, rates)) for place, part in parts.items()})
    every = [row for family in sheet.families for row in family.rows]
    told = [
        {"command": part["command"], "rows": len(part["rows"]), "anchors": rates[place]}
        for place, part in parts.items()
    ]
    found = {
        **head,
        "command": "; ".join(dict.fromkeys(part["command"] for part in parts.values())),
        "date": max(part["date"] for part in parts.values()),
        "libraries": {name: text for part in parts.values() for name, text in part["libraries"].items()},
        "lost": {place: why for part in parts.values() for place, why in part["lost"].items()},
        "parts": told,
        "rows": rows,
    }
    return results.summed(found, sheet, every)


def _rates(part: Mapping[str, Any]) -> dict[str, float]:
    """Return what the device of a part did: the middle of what was found around its accepted rows."""
    found: dict[str, list[float]] = {}
    for row in part["rows"]:
        for name, rate in row["anchors"].items() if row["accepted"] else ():
            found.setdefault(name, []).append(rate)
    return {name: float(f"{statistics.median(some):.5g}") for name, some in found.items()}


def _apart(place: str, rates: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Anchors of a part -> how far it is from the part in the middle, where that is too far."""
    found = {}
    for name, rate in rates[place].items():
        middle = statistics.median_low(other[name] for other in rates.values() if name in other)
        off = difference({name: rate}, {name: middle})
        if off > ANCHORS_WITHIN:
            found[name] = round(off, 4)
    return found


def _held(part: Mapping[str, Any], apart: Mapping[str, float]) -> list[dict[str, Any]]:
    """The rows of a part; not accepted are those that are bound by a rate that is apart."""
    return [
        {**row, "accepted": False, "apart": apart[row["bound"]]}
        if row["accepted"] and row["bound"] in apart and not part["quick"]
        else dict(row)
        for row in part["rows"]
    ]


def _rows(parts: Mapping[str, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Take one of each row: the accepted one, else the one over which the device changed least."""
    found: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for place, rows in parts.items():
        for row in rows:
            key = row["family"], row["name"]
            before, other = found.get(key, ("", None))
            if other is not None and other["accepted"] and row["accepted"]:
                raise ConfigError(
                    f"--join: {'/'.join(key)} is accepted in {before} and in {place}: the parts of a run share no row. "
                    f"Leave one of the files out"
                )
            if other is None or _standing(row) > _standing(other):
                found[key] = place, row
    return [row for _, row in found.values()]


def _standing(row: Mapping[str, Any]) -> tuple[bool, float]:
    return row["accepted"], -row["moved"]
