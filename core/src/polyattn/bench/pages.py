"""A result file as Markdown: the bars, then a table for each family; or a line for each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..measuring.device_rates import UNITS
from .bars import best

__all__ = [
    "BENCHMARK",
    "QUICK",
    "breaking",
    "caption",
    "cell",
    "device_line",
    "figure",
    "markdown",
    "parts_line",
    "rejected",
    "said_of",
    "summary",
    "title_of",
    "verdict_of",
]

BENCHMARK = "polyattn bench"
"""What result files of this command call themselves."""

QUICK = "Rows as small as they get: the times mean nothing."

Result = Mapping[str, Any]
_MOST = 12
"""Rows that are named under a bar."""
_SHORT = {"tuned": "tuned", "shipped": "untuned", "untuned": "by rules"}


def markdown(result: Result) -> str:
    """The run in a line, its bars, a table of rates for each family; what failed, with its reason."""
    lines = _head(result)
    if result["verdicts"]:
        lines += _bars(result["verdicts"])
    for name in dict.fromkeys(row["family"] for row in result["rows"]):
        lines += ["", *_family(name, [row for row in result["rows"] if row["family"] == name])]
    return "\n".join(lines)


def summary(result: Result) -> str:
    """The run in a line; each family in one, the fastest candidate beside the fastest peer; the bars."""
    lines = _head(result)
    lines += ["| family | rows | fastest candidate | fastest peer, in rows | geometric mean | least | of row |"]
    lines += ["|---|---:|---|---|---:|---:|---|"]
    for name in dict.fromkeys(row["family"] for row in result["rows"]):
        lines.append(_in_a_line(name, [row for row in result["rows"] if row["family"] == name]))
    return "\n".join([*lines, "", *_bars(result["verdicts"])])


def _in_a_line(family: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A family: rates from the least to the most, ratios of its accepted rows to the fastest peer."""
    rates, peers, ratios = [], Counter[str](), {}
    for row in (row for row in rows if row["accepted"]):
        own, peer = best(row, peers=False), best(row, peers=True)
        if own is not None:
            rates.append(row["entries"][own]["rate"])
        if peer is not None:
            peers[peer] += 1
        if own is not None and peer is not None:
            ratios[row["name"]] = row["entries"][peer]["us"] / row["entries"][own]["us"]
    least = min(ratios, key=lambda name: ratios[name], default="")
    mean = math.exp(math.fsum(map(math.log, ratios.values())) / len(ratios)) if ratios else None
    count = str(len(rates)) if len(rates) == len(rows) else f"{len(rates)} of {len(rows)}"
    said = f"{' to '.join(dict.fromkeys(map(figure, (min(rates), max(rates)))))} {rows[0]['unit']}" if rates else ""
    named = ", ".join(f"{name} {n}" for name, n in peers.most_common())
    cells = ["" if mean is None else f"{mean:.2f}", f"{ratios[least]:.2f}" if least else "", least]
    return f"| {' | '.join([family, count, said, named, *cells])} |"


def _head(result: Result) -> list[str]:
    lines = [f"{caption(result)}.", ""]
    if result["quick"]:
        lines += [QUICK, ""]
    for line in (result.get("note"), device_line(result), parts_line(result)):
        lines += [line, ""] if line else []
    return lines


def caption(result: Result) -> str:
    """The run in one line, without a full stop."""
    named = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['date']}, {result['device']}; {named}"


def device_line(result: Result) -> str:
    """What the device itself did, over all rows."""
    said = []
    for name, unit in UNITS.items():
        rates = [row["anchors"][name] for row in result["rows"] if name in row["anchors"]]
        if rates and not result["quick"]:
            said.append(f"{name} {min(rates):.0f} to {max(rates):.0f} {unit}")
    return f"The device, over all rows: {', '.join(said)}." if said else ""


def parts_line(result: Result) -> str:
    """What the devices of a run in several parts did."""
    parts = result.get("parts", [])
    if len(parts) < 2 or result["quick"]:
        return ""
    said = []
    for name, unit in UNITS.items():
        rates = [f"{part['anchors'][name]:.0f}" for part in parts if name in part["anchors"]]
        said.append(f"{name} {', '.join(rates)} {unit}")
    return f"In {len(parts)} parts, each on a device of its own; the middle of what those did: {'; '.join(said)}."


def rejected(row: Mapping[str, Any]) -> str:
    """Why no verdict reads a row, "" = they do."""
    if row["accepted"]:
        return ""
    if "apart" in row:
        return f"rejected: its device is {row['apart']:.0%} from the others"
    return f"rejected: the device changed by {row['moved']:.0%}"


def title_of(row: Mapping[str, Any]) -> str:
    """A row for people: its own name, and what is wrong with it."""
    why = rejected(row)
    return str(row["name"]) + (f" ({why})" if why else "")


def said_of(row: Mapping[str, Any]) -> str:
    """polyattn's choices in a row, and how they compare with the fastest candidate."""
    fastest = best(row, peers=False)
    parts = []
    for how, short in _SHORT.items():
        name = row["choice"].get(how)
        if name not in row["entries"]:
            continue  # of a run that was to measure other candidates
        us = row["entries"][name].get("us")
        share = f" {row['entries'][fastest]['us'] / us:.2f}" if us and fastest else ""
        parts.append(f"{short} {name.rpartition('/')[2]}{share}")
    return ", ".join(parts)


def cell(entry: Mapping[str, Any] | None) -> str:
    """Rate and share of the ceiling of an entry."""
    if entry is None:
        return ""
    return f"{figure(entry['rate'])} ({entry['percent']:.0f}%)" if "us" in entry else "-"


def figure(rate: float) -> str:
    """A rate with three digits, or as many as it has before the point."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _bars(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| bar | asked | verdict | geometric mean | least | of row |", "|---|---|---|---:|---:|---|"]
    for said in verdicts:
        figures = [f"{said[name]:.2f}" if name in said else "" for name in ("geomean", "least")]
        cells = [said["bar"], said["asked"], verdict_of(said), *figures, said.get("least_row", "")]
        lines.append(f"| {' | '.join(cells)} |")
    broken = [f"- {said['bar']}: {line}" for said in verdicts if (line := breaking(said))]
    return [*lines, *([""] if broken else []), *broken]


def breaking(said: Mapping[str, Any]) -> str:
    """The rows by which a bar is missed, "" = it is not."""
    below: Mapping[str, Any] = said.get("below", {})
    if not below:
        return ""
    rows: Mapping[str, float] = below["rows"]
    named = [f"{row} {ratio:.2f}" for row, ratio in list(rows.items())[:_MOST]]
    more = [f"{len(rows) - _MOST} more"] if len(rows) > _MOST else []
    return f"{len(rows)} of {said['rows']} rows are below {below['limit']:g}: {'; '.join([*named, *more])}"


def verdict_of(said: Mapping[str, Any]) -> str:
    """met, missed or incomplete, with what that is to be read with."""
    words = [str(said["verdict"])]
    if "spread" in said:
        words[0] += f" ({said['spread']:.1%})"
    if said["missing"]:
        words.append(f"{len(said['missing'])} of {len(said['missing']) + said['rows']} rows missing")
    return ", ".join(words)


def _family(family: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row["entries"]))
    shown = [name for name in names if any("us" in row["entries"].get(name, {}) for row in rows)]
    model = f", {rows[0]['model']}" if rows[0].get("model") else ""
    lines = [f"`{family}`{model}: {rows[0]['unit']} (share of the ceiling)", ""]
    choices = any(said_of(row) for row in rows)
    if shown:
        head, rule = (["choice"], "---|") if choices else ([], "")
        lines += [f"| {' | '.join(['row', *shown, *head])} |", f"|---|{'---:|' * len(shown)}{rule}"]
        for row in rows:
            cells = [title_of(row), *(cell(row["entries"].get(name)) for name in shown)]
            lines.append(f"| {' | '.join([*cells, *([said_of(row)] if choices else [])])} |")
    failures: dict[str, list[str]] = {}
    for row in rows:
        for name, entry in row["entries"].items():
            if "failed" in entry:
                failures.setdefault(f"{name}: {entry['failed']}", []).append(row["name"])
        if "note" in row:
            failures.setdefault(str(row["note"]), []).append(row["name"])
    where = {why: "every row" if len(some) == len(rows) else "; ".join(some) for why, some in failures.items()}
    return [*lines, *([""] if where and shown else []), *(f"- {why} ({some})" for why, some in where.items())]
