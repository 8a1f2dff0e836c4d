"""Bars, and from measured rows to verdicts. Times are divided where they were measured together: of one row, or of two
rows between which the device did not change."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .rows import Row

__all__ = [
    "ANCHORS_WITHIN",
    "CHOICES",
    "OBJECTS",
    "OWN",
    "SUBJECTS",
    "Bar",
    "Measured",
    "best",
    "difference",
    "time_of",
    "verdicts",
]

OWN = "polyattn/"
"""What the names of polyattn's candidates begin with; peers have no slash in theirs."""

ANCHORS_WITHIN = 0.03
"""A row counts where the device's own rates before and after it differ by at most so much."""

CHOICES = ("tuned", "shipped", "unseen", "rules")
"""What polyattn chooses with what was measured on the machine before; where nothing was, by what its plugins ship,
and its rules where those know no such request; the same, if they did not have this very request; by its rules
alone."""

SUBJECTS = (*CHOICES, "best")
"""Whom a bar may be on, besides a candidate by its name: what polyattn chooses; the fastest candidate."""

OBJECTS = (*SUBJECTS, "best_candidate", "best_peer", "one_another")
"""Whom it may compare those with, besides a peer, a candidate or a family by its name."""

Measured = Mapping[str, Any]
"""A row of a result file: `family`, `name`, `fields`, `anchors`, `accepted`, `entries`, `choice`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """Describes what rows must reach: a ratio says how many times as fast `who` is as what `than` names.

    Attributes:
        name. of: families, `*` is anything. who: one of `SUBJECTS`, or a candidate's name.
        than: one of `OBJECTS`, a peer's or candidate's name, a pattern of peers' names (the fastest of them), or a
            family: the row of it with the same fields as `match`.
        each: of every row. geomean: of all of them. stretch: as geomean, wanted rather than needed.
        spread: slowest over fastest row, less 1. work: a field of the row that the other's time is multiplied by.
    """

    name: str
    of: tuple[str, ...]
    than: str
    who: str = "tuned"
    match: tuple[str, ...] = ()
    each: float | None = None
    geomean: float | None = None
    stretch: float | None = None
    spread: float | None = None
    work: str = ""

    def asked(self) -> str:
        """Return the bar in words."""
        limits = {"each": self.each, "geomean": self.geomean, "stretch": self.stretch, "spread": self.spread}
        words = [f"{name} {limit:g}" for name, limit in limits.items() if limit is not None]
        return f"{self.who}: {', '.join(words)} x {self.than}"


def difference(start: Mapping[str, float], end: Mapping[str, float]) -> float:
    """The largest relative difference of an anchor between two measurements."""
    return max((abs(start[name] - end[name]) / max(start[name], end[name]) for name in start if name in end), default=0)


def time_of(row: Measured, entry: str) -> float | None:
    """Microseconds of an entry, by its name."""
    found: float | None = row["entries"].get(entry, {}).get("us")
    return found


def best(row: Measured, *, peers: bool, pattern: str = "*") -> str | None:
    """The fastest of the peers, or of the candidates, whose names the pattern has."""
    timed = {name: e["us"] for name, e in row["entries"].items() if "us" in e and bool(e.get("peer")) == peers}
    return min(fnmatch.filter(timed, pattern), key=lambda name: timed[name], default=None)


def verdicts(bars: Iterable[Bar], wanted: Sequence[Row], measured: Iterable[Measured]) -> list[dict[str, Any]]:
    """Return, for each bar on some of the rows: its name, verdict (met, missed or incomplete), figures, the rows that
    are wanting (`missing`) and, of one that is missed, those below what is asked (`below`).

    Args:
        bars. wanted: all rows that a run was to measure. measured: what it did; rows that were not accepted are none.
    """
    rows = {(row["family"], row["name"]): row for row in measured if row["accepted"]}
    found = []
    for bar in bars:
        of = [row for row in wanted if any(fnmatch.fnmatchcase(row.family, pattern) for pattern in bar.of)]
        if of:
            found.append(_verdict(bar, of, rows))
    return found


def _verdict(bar: Bar, of: Sequence[Row], rows: Mapping[tuple[str, str], Measured]) -> dict[str, Any]:
    mine = {row.id: rows[row.family, row.name] for row in of if (row.family, row.name) in rows}
    found = {name: ratio for name, row in mine.items() if (ratio := _ratio(bar, row, rows)) is not None}
    missing = [row.id for row in of if row.id not in found]
    said: dict[str, Any] = {"bar": bar.name, "asked": bar.asked(), "rows": len(found), "missing": missing}
    if not found:
        return {**said, "verdict": "incomplete"}
    least = min(found, key=lambda name: found[name])
    met, figures = True, {"least": round(found[least], 3), "least_row": least}
    if bar.spread is not None:
        # The values are times here.
        spread = max(found.values()) / min(found.values()) - 1
        met, figures = spread <= bar.spread, {"spread": round(spread, 3)}
    if bar.each is not None:
        met = met and found[least] >= bar.each
    if bar.spread is None:
        mean = math.exp(math.fsum(map(math.log, found.values())) / len(found))
        figures["geomean"] = round(mean, 3)
        short = bar.geomean is not None and mean < bar.geomean
        met = met and not short
        if bar.stretch is not None:
            figures["stretch"] = mean >= bar.stretch
        if not met:
            figures["below"] = _below(found, bar.geomean if short else bar.each)
    return {**said, **figures, "verdict": "missed" if not met else "incomplete" if missing else "met"}


def _below(found: Mapping[str, float], limit: float | None) -> dict[str, Any]:
    """The rows by which a bar is missed, the least first."""
    assert limit is not None
    rows = sorted((ratio, name) for name, ratio in found.items() if ratio < limit)
    return {"limit": limit, "rows": {name: round(ratio, 3) for ratio, name in rows}}


def _ratio(bar: Bar, row: Measured, rows: Mapping[tuple[str, str], Measured]) -> float | None:
    """How many times as fast as the bar's `than` a row's `who` is; of a spread, its time."""
    own = _named(row, bar.who)
    if own is None or bar.than == "one_another":
        return own
    other = _of_family(bar, row, rows) if bar.match else _named(row, bar.than)
    return None if other is None else other / own


def _named(row: Measured, who: str) -> float | None:
    """The time of an entry, by its name or by what it is."""
    name: str | None = who
    if who in CHOICES:
        name = row["choice"].get(who)
    elif who in ("best", "best_candidate", "best_peer"):
        name = best(row, peers=who == "best_peer")
    elif "*" in who:
        name = best(row, peers=True, pattern=who)
    return None if name is None else time_of(row, name)


def _of_family(bar: Bar, row: Measured, rows: Mapping[tuple[str, str], Measured]) -> float | None:
    """The time of the row of another family that this one is compared with, if the device did what bounds them at the
    same rate."""
    bound = row["bound"]
    for other in rows.values():
        same = all(other["fields"].get(name) == row["fields"].get(name) for name in bar.match)
        rates = ({bound: one["anchors"][bound]} for one in (row, other))
        if other["family"] == bar.than and same and difference(*rates) <= ANCHORS_WITHIN:
            own = _named(other, bar.who)
            return None if own is None else own * (row["fields"][bar.work] if bar.work else 1)
    return None
