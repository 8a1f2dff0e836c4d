"""A result file as Markdown: the bars, and a table for each family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .bars import OWN, best
from .measure.device_rates import UNITS

__all__ = [
    "BENCHMARK",
    "MARKED",
    "QUICK",
    "again_line",
    "bars_table",
    "breaking",
    "caption",
    "cell",
    "days",
    "device_line",
    "families",
    "figure",
    "head",
    "markdown",
    "memory_of",
    "parts_line",
    "rejected",
    "said_of",
    "title_of",
    "verdict_of",
]

BENCHMARK = "polyattn bench"
"""What result files of this command call themselves."""

MARKED = "\\*"
"""Of a row that was measured again (`again_line`), in Markdown."""

QUICK = "Rows as small as they get: the times mean nothing."

Result = Mapping[str, Any]
_MOST = 12
"""Rows that are named under a bar."""


def markdown(result: Result) -> str:
    """The run in a line, its bars, a table of rates for each family; what failed, with its reason."""
    lines = head(result)
    if result["verdicts"]:
        lines += bars_table(result["verdicts"])
    return "\n".join([*lines, *families(result)])


def families(result: Result) -> list[str]:
    """Return what the entries are, and a table of rates for each family; what failed, with its reason."""
    lines = _legend(result)
    for name in dict.fromkeys(row["family"] for row in result["rows"]):
        lines += ["", *_family(name, [row for row in result["rows"] if row["family"] == name])]
    return lines


def head(result: Result) -> list[str]:
    """The run in a line, and what is to be known before its figures are read."""
    lines = [f"{caption(result)}.", ""]
    if result["quick"]:
        lines += [QUICK, ""]
    for line in (result.get("note"), device_line(result), parts_line(result), again_line(result)):
        lines += [line, ""] if line else []
    return lines


def caption(result: Result) -> str:
    """The run in one line, without a full stop."""
    named = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{days(result)}, {result['device']}; {named}"


def days(result: Result) -> str:
    """Return when the rows were measured."""
    found = sorted({row["date"] for row in result["rows"]}) or [result["date"]]
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def device_line(result: Result) -> str:
    """Return what the device itself did, over all rows."""
    said = []
    for name, unit in UNITS.items():
        rates = [row["anchors"][name] for row in result["rows"] if name in row["anchors"]]
        if rates and not result["quick"]:
            said.append(f"{name} {min(rates):.0f} to {max(rates):.0f} {unit}")
    return f"The device, over all rows: {', '.join(said)}." if said else ""


def parts_line(result: Result) -> str:
    """Return what the devices of a run in several parts did."""
    parts = result.get("parts", [])
    if len(parts) < 2 or result["quick"]:
        return ""
    said = []
    for name, unit in UNITS.items():
        rates = [f"{part['anchors'][name]:.0f}" for part in parts if name in part["anchors"]]
        said.append(f"{name} {', '.join(rates)} {unit}")
    return f"In {len(parts)} parts, each on a device of its own; the middle of what those did: {'; '.join(said)}."


def again_line(result: Result) -> str:
    """Say how many rows lost an earlier measurement, and what else keeps them from being of one run."""
    again = sum("replaced" in row for row in result["rows"])
    codes = {row["code"] for row in result["rows"] if "code" in row}
    said = []
    if again:
        said.append(
            f"{again} of {len(result['rows'])} rows, marked *, were measured again after the others; that is what is "
            f"shown, and the measurement before it is not kept."
        )
    if len(codes) > 1:
        said.append(f"They are of {len(codes)} states of polyattn's code.")
    return " ".join(said)


def _legend(result: Result) -> list[str]:
    """Return what the entries are that have times."""
    timed = {name for row in result["rows"] for name, entry in row["entries"].items() if "us" in entry}
    peers = [f"`{name}` {what}" for name, what in result["libraries"].items() if name in timed]
    if not timed:
        return []
    said = "`polyattn/NAME` is the backend of that name, called through polyattn"
    return ["", f"{said}; called by hand: {'; '.join(peers)}." if peers else f"{said}."]


def rejected(row: Mapping[str, Any]) -> str:
    """Say why no verdict reads a row, "" = they do."""
    if row["accepted"]:
        return ""
    if "apart" in row:
        return f"rejected: its device is {row['apart']:.0%} from the others"
    return f"rejected: the device changed by {row['moved']:.0%}"


def title_of(row: Mapping[str, Any]) -> str:
    """A row for people: its own name, whether it was measured again (`again_line`), and what is wrong with it."""
    why = "; ".join(filter(None, (rejected(row), "its sheet has it no more" if row.get("gone") else "")))
    return str(row["name"]) + (f" {MARKED}" if "replaced" in row else "") + (f" ({why})" if why else "")


def said_of(row: Mapping[str, Any]) -> str:
    """polyattn's choices in a row, and how they compare with the fastest candidate."""
    fastest = best(row, peers=False)
    parts = []
    for how, name in row["choice"].items():
        if name not in row["entries"]:
            continue  # of a run that was to measure other candidates
        us = row["entries"][name].get("us")
        share = f" {row['entries'][fastest]['us'] / us:.2f}" if us and fastest else ""
        parts.append(f"{how} {name.removeprefix(OWN)}{share}")
    return ", ".join(parts)


def memory_of(row: Mapping[str, Any]) -> str:
    """MiB that a call takes beside its inputs, its result included: polyattn's choice, the least and the most."""
    peaks = {name: entry.get("peak_bytes", 0) for name, entry in row["entries"].items() if "us" in entry}
    if not any(peaks.values()):
        return ""
    chosen = row["choice"].get("tuned")
    least, most = (way(peaks, key=lambda name: peaks[name]) for way in (min, max))
    parts = [f"{figure(peaks[chosen] / 2**20)}"] if chosen in peaks else []
    return ", ".join([*parts, *(f"{figure(peaks[name] / 2**20)} {name}" for name in dict.fromkeys((least, most)))])


def cell(entry: Mapping[str, Any] | None) -> str:
    """Rate and share of the ceiling of an entry."""
    if entry is None:
        return ""
    return f"{figure(entry['rate'])} ({entry['percent']:.0f}%)" if "us" in entry else "-"


def figure(rate: float) -> str:
    """A rate with three digits, or as many as it has before the point."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def bars_table(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The bars and their verdicts, and the rows by which one is missed."""
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
    bounds = list(dict.fromkeys(row["bound"] for row in rows))
    lines = [f"`{family}`{model}: {rows[0]['unit']} (share of {' or '.join(bounds)}, which bounds it)", ""]
    more = {
        "bound by": [row["bound"] if len(bounds) > 1 else "" for row in rows],
        "choice": [said_of(row) for row in rows],
        "MiB: choice, least, most": [memory_of(row) for row in rows],
    }
    more = {name: cells for name, cells in more.items() if any(cells)}
    if shown:
        lines += [f"| {' | '.join(['row', *shown, *more])} |", f"|---|{'---:|' * len(shown)}{'---|' * len(more)}"]
        for number, row in enumerate(rows):
            cells = [title_of(row), *(cell(row["entries"].get(name)) for name in shown)]
            lines.append(f"| {' | '.join([*cells, *(column[number] for column in more.values())])} |")
    where = _failures(rows)
    return [*lines, *([""] if where and shown else []), *(f"- {line}" for line in where)]


def _failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say why entries have no times, and in which rows: a line for each reason."""
    who: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    names = dict.fromkeys(name for row in rows for name, entry in row["entries"].items() if "failed" in entry)
    for name in names:
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if why := row["entries"].get(name, {}).get("failed"):
                reasons.setdefault(why, []).append(row["name"])
        for why, some in reasons.items():
            who.setdefault((why, tuple(some)), []).append(name)
    found = {f"{', '.join(some)}: {why}": where for (why, where), some in who.items()}
    for row in (row for row in rows if "note" in row):
        found[row["note"]] = (*found.get(row["note"], ()), row["name"])
    return [f"{said} ({'every row' if len(where) == len(rows) else '; '.join(where)})" for said, where in found.items()]
