"""How far the tables of measurements that polyattn ships reach: what they choose for requests that they do not have.

    python benchmarks/shipped_tables.py [--json FILE]
    python benchmarks/shipped_tables.py --render FILE     # a result file as the table of docs/benchmarks.md

Each measurement is left out, with all others of its request, and the rest of the table is asked as selection asks it:
where that has a request like this one, it says who is fast; where it has none, the rules decide. The times are those of
the measurement itself. Nothing runs here, so any machine gives the same figures. A measurement that has no time of the
choice of the rules is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import report

from polyattn.records import AttentionRequest
from polyattn.tuning import Measured, Place, request_of, shipped_advice, with_lengths
from polyattn.tuning.known import shipped, shipped_rows

ALL = "all"


def kind_of(request: AttentionRequest) -> str:
    """In words of docs/semantics.md."""
    return f"{request.family}, training" if request.grad else f"{request.family} {request.phase}"


def choices(place: Place) -> Iterator[dict[str, Any]]:
    """Of every measurement of a device: who is chosen without it, and how fast that is beside the fastest."""
    for key, measurements in shipped(lambda: place).measured.items():
        request = request_of(json.loads(key))
        for one in (one for one in measurements if one.rule in one.times):
            said = shipped_advice(with_lengths(request, *one.lengths), lambda: place, own=False)
            chosen = next((name for name, _ in said.order if name in one.times), "")
            yield {
                "kind": kind_of(request),
                "request": request.summary().replace(f" {request.platform},", ""),
                "lengths": list(one.lengths),
                "rules": [one.rule, speed(one, one.rule)],
                "unseen": [chosen or one.rule, speed(one, chosen or one.rule)],
                "like": json.loads(json.dumps(said.kin.fields)) if said.kin and chosen else None,
            }


def speed(one: Measured, backend: str) -> float:
    """Of the fastest backend."""
    return round(min(one.times.values()) / one.times[backend], 4)


def measure() -> dict[str, Any]:
    """By device."""
    places = {(row.place.device, row.place.arch) for row in shipped_rows()}
    return {device: list(choices(Place(device, arch))) for device, arch in sorted(places)}


def figures(rows: Sequence[Mapping[str, Any]], who: str) -> list[str]:
    """The geometric mean and the least."""
    found = [row[who][1] for row in rows]
    return [f"{math.exp(sum(map(math.log, found)) / len(found)):.3f}", f"{min(found):.2f}"] if found else ["", ""]


def markdown(result: dict[str, Any]) -> str:
    parts = []
    for device, rows in result["devices"].items():
        kinds = {
            ALL: rows,
            **{kind: [r for r in rows if r["kind"] == kind] for kind in sorted({r["kind"] for r in rows})},
        }
        head = ["requests", "measured", "rules alone", "table without it", "like another", *["rules alone", "least"]]
        head += ["table without it", "least"]
        lines = [f"{device}:", "", f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
        for kind, some in kinds.items():
            like = [row for row in some if row["like"]]
            cells = [kind, str(len(some)), figures(some, "rules")[0], figures(some, "unseen")[0]]
            cells += [str(len(like)), *figures(like, "rules"), *figures(like, "unseen")]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join([f"{report.caption(result)}.", *parts])


def main() -> None:
    args = report.arguments(report.parser(__doc__), markdown)
    if args is not None:
        report.finish({**report.stamp("shipped-tables"), "devices": measure()}, markdown, args.json)


if __name__ == "__main__":
    main()
