"""How far the tables of measurements that polyattn ships reach: what they choose for requests that they do not have.

    python benchmarks/shipped_tables.py [--json FILE]
    python benchmarks/shipped_tables.py --render FILE     # a result file as the table of docs/benchmarks.md

Each measurement is left out, with all others of its request, and selection is asked with the rest of the table, on a
machine that has the libraries which were measured: where the table has a request like this one, it says who is fast;
where it has none, the rules decide. Then a choice costs what its device or its host took longer for in the measurement
itself, the host's time not where there is none (requests that are recorded into a graph). Nothing runs here, so any
machine gives the same figures. A measurement that has no time of the choice of the rules is left out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import report

from polyattn.contract import AttentionRequest
from polyattn.selection.aliases import parts
from polyattn.selection.inspection import catalogue, served_by
from polyattn.selection.select import Catalogue, Policy, select
from polyattn.selection.tuned_policy import shipped_policy
from polyattn.tuning import Measured, Place, request_of, with_lengths
from polyattn.tuning.known import shipped, shipped_rows

ALL = "all"
PLATFORMS = {"sm": "cuda", "gfx": "rocm"}
"""By how the names of their architectures begin."""


def kind_of(request: AttentionRequest) -> str:
    """In words of docs/semantics.md."""
    return f"{request.family}, training" if request.grad else f"{request.family} {request.phase}"


def choices(place: Place, there: Catalogue) -> Iterator[dict[str, Any]]:
    """Of every measurement of a device: who is chosen without it, and how fast that is beside the fastest.

    Args:
        there: what such a machine has.
    """
    platform = next(name for letters, name in PLATFORMS.items() if place.arch.startswith(letters))
    for key, measurements in shipped(lambda: place).tables.measured.items():
        request = dataclasses.replace(request_of(json.loads(key)), platform=platform, arch=place.arch).normalised()
        for one in (one for one in measurements.values() if one.rule in one.times):
            asked = with_lengths(request, *one.lengths)
            said = select(asked, there, shipped_policy(Policy(), asked, own=False, place=place))
            chosen = known_as(served_by(said), one) if said.source == "tuned" else ""
            yield {
                "kind": kind_of(request),
                "request": request.summary().replace(f" {platform}:{place.arch},", ""),
                "lengths": list(one.lengths),
                "rules": [one.rule, speed(one, one.rule)],
                "unseen": [chosen or one.rule, speed(one, chosen or one.rule)],
                "like": bool(chosen),
            }


def known_as(served: str, one: Measured) -> str:
    """Whom a measurement has times of, as it names them; "" where it has none of this one."""
    whole = served.partition("@")[0]
    backend, kind = parts(whole)
    names = [name for name in (whole, backend) if name in one.times and one.by.get(name, kind) == kind]
    return names[0] if names else ""


def speed(one: Measured, backend: str) -> float:
    """Of the fastest backend."""
    costs = one.costs(recorded=False)
    return round(min(costs.values()) / costs[backend], 4)


def measure() -> dict[str, Any]:
    """By device."""
    libraries: dict[tuple[str, str], dict[str, str]] = {}
    for row in shipped_rows():
        libraries.setdefault((row.place.device, row.place.arch), {}).update(row.place.versions)
    return {
        device: list(choices(Place(device, arch), catalogue(versions)))
        for (device, arch), versions in sorted(libraries.items())
    }


def figures(rows: Sequence[Mapping[str, Any]], who: str) -> list[str]:
    """The geometric mean and the least."""
    found = [row[who][1] for row in rows]
    return [f"{math.exp(sum(map(math.log, found)) / len(found)):.3f}", f"{min(found):.2f}"] if found else ["", ""]


def markdown(result: dict[str, Any]) -> str:
    tables = []
    columns = ["rules alone", "least", "table without it", "least"]
    head = ["requests", "measured", *columns, "like another", *columns]
    for device, rows in result["devices"].items():
        kinds = {
            ALL: rows,
            **{kind: [r for r in rows if r["kind"] == kind] for kind in sorted({r["kind"] for r in rows})},
        }
        lines = [f"{device}:", "", f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
        for kind, some in kinds.items():
            like = [row for row in some if row["like"]]
            cells = [kind, str(len(some)), *figures(some, "rules"), *figures(some, "unseen")]
            cells += [str(len(like)), *figures(like, "rules"), *figures(like, "unseen")]
            lines.append(f"| {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join([f"{report.caption(result)}.", *tables])


def main() -> None:
    args = report.arguments(report.parser(__doc__), markdown)
    if args is not None:
        report.finish({**report.stamp("shipped-tables"), "devices": measure()}, markdown, args.json)


if __name__ == "__main__":
    main()
