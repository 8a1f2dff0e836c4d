"""From measured parts to verdicts. A ratio to a peer is of times in one part, one to another family of times in one
run: what was measured further apart is never divided."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .sheet import OWN, Bar, Row, Sheet

__all__ = ["ANCHORS", "Measured", "best_peer", "difference", "fields_of", "usable", "verdicts"]

ANCHORS = {"matmul": "TFLOP/s", "copy": "GB/s", "read": "GB/s"}
"""Units of the device's own rates."""

Measured = Mapping[str, Any]
"""A row of a result file: `fields` of the row, `name`, `family`, `entries`."""


def _us(row: Measured, entry: str) -> float | None:
    found: float | None = row["entries"].get(entry, {}).get("us")
    return found


def usable(parts: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """Rows of accepted parts; a row that several parts measured is there several times."""
    return [row for part in parts if part["accepted"] for row in part["rows"]]


def best_peer(rows: Iterable[Measured]) -> tuple[str, float] | None:
    """(its name, how many times as fast as it the own kernel is): the least of the ratios in each part."""
    ratios = [
        (entry["us"] / own, name)
        for row in rows
        if (own := _us(row, OWN)) is not None
        for name, entry in row["entries"].items()
        if name != OWN and "us" in entry
    ]
    return (min(ratios)[1], min(ratios)[0]) if ratios else None


def verdicts(sheet: Sheet, parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each bar: its name, verdict (met, missed or incomplete), figures, rows that are wanting, and peers that none
    of its rows has a time of."""
    rows: dict[tuple[str, str], list[Measured]] = {}
    for row in usable(parts):
        rows.setdefault((row["family"], row["name"]), []).append(row)
    return [_verdict(bar, {family.name: family.rows for family in sheet.families}, rows) for bar in sheet.bars]


def _verdict(
    bar: Bar, families: Mapping[str, Sequence[Row]], rows: Mapping[tuple[str, str], list[Measured]]
) -> dict[str, Any]:
    wanted = [(family, row.name) for family in bar.of for row in families[family]]
    found = {key: ratio for key in wanted if (ratio := _ratio(bar, rows.get(key, []), rows)) is not None}
    missing = [name for family, name in wanted if (family, name) not in found]
    said: dict[str, Any] = {"bar": bar.name, "asked": _asked(bar), "rows": len(found), "missing": missing}
    if bar.than == "best_peer":
        measured = [row for key in wanted for row in rows.get(key, [])]
        peers = dict.fromkeys(peer for family in bar.of for row in families[family] for peer in row.peers)
        said["without"] = [peer for peer in peers if not any(_us(row, peer) for row in measured)]
    if not found:
        return {**said, "verdict": "incomplete"}
    values = list(found.values())
    least = min(found, key=lambda key: found[key])
    met, figures = True, {"least": round(found[least], 3), "least_row": least[1]}
    if bar.spread is not None:
        # The values are times here.
        spread = max(values) / min(values) - 1
        met, figures = spread <= bar.spread, {"spread": round(spread, 3)}
    if bar.each is not None:
        met = met and found[least] >= bar.each
    if bar.geomean is not None:
        mean = math.exp(sum(map(math.log, values)) / len(values))
        met, figures = met and mean >= bar.geomean, {**figures, "geomean": round(mean, 3)}
        if bar.stretch is not None:
            figures["stretch"] = mean >= bar.stretch
    verdict = "missed" if not met else "incomplete" if missing else "met"
    return {**said, **figures, "verdict": verdict}


def _asked(bar: Bar) -> str:
    limits = {"each": bar.each, "geomean": bar.geomean, "stretch": bar.stretch, "spread": bar.spread}
    words = [f"{name} {limit:g}" for name, limit in limits.items() if limit is not None]
    return f"{', '.join(words)} x {bar.than}"


def _ratio(bar: Bar, measured: Sequence[Measured], rows: Mapping[tuple[str, str], list[Measured]]) -> float | None:
    """How many times as fast as the bar's `than` a row is; of a spread, its time."""
    if bar.than == "one_another":
        times = [us for row in measured if (us := _us(row, OWN)) is not None]
        return min(times) if times else None
    if bar.than == "best_peer":
        best = best_peer(measured)
        return None if best is None else best[1]
    if not bar.match:
        return _least(measured, lambda row: _us(row, bar.than))
    return _least(measured, lambda row: _of_family(bar, row, rows))


def _least(measured: Iterable[Measured], other: Callable[[Measured], float | None]) -> float | None:
    found = [(other(row), _us(row, OWN)) for row in measured]
    ratios = [than / own for than, own in found if than is not None and own is not None]
    return min(ratios) if ratios else None


def _of_family(bar: Bar, row: Measured, rows: Mapping[tuple[str, str], list[Measured]]) -> float | None:
    """The own time of the row of another family that this one is compared with, in the same run."""
    for (family, _), others in rows.items():
        for other in others:
            same = all(other["fields"][name] == row["fields"][name] for name in bar.match)
            if family == bar.than and same and other["run"] == row["run"]:
                own = _us(other, OWN)
                return None if own is None else own * (row["fields"][bar.work] if bar.work else 1)
    return None


def fields_of(row: Row) -> dict[str, Any]:
    """The fields of a sheet row that a result file keeps."""
    return {k: v for k, v in dataclasses.asdict(row).items() if k not in ("family", "kind", "peers")}


def difference(start: Mapping[str, float], end: Mapping[str, float]) -> float:
    """The largest relative difference of an anchor between two measurements."""
    return max(abs(start[name] - end[name]) / max(start[name], end[name]) for name in start)
