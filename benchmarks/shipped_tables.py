"""How far the tables of measurements that polyattn ships reach: what they choose for requests that they do not have.

    python benchmarks/shipped_tables.py [--json FILE]
    python benchmarks/shipped_tables.py --render FILE     # a result file as the table of docs/benchmarks.md

Each measurement is left out, with all others of its request, and selection is asked with the rest of the table, on a
machine that has the libraries which were measured, and on one that has Triton and PyTorch alone: where the table has a
request like this one, it says who is fast; where it has none, the cost model predicts it; where that knows nothing,
the rules decide. The cost model is also asked alone, made without all requests of as many heads that are as wide: so
it is what another device of the architecture gets for a model that nobody measured. Then a choice costs what its
device or its host took longer for in the measurement itself, the host's time not where there is none (requests that are
recorded into a graph). Nothing runs here, so any machine gives the same figures. A measurement that has no time of the
choice of the rules is left out.
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
from polyattn.selection.tuned_policy import policy_of, shipped_policy
from polyattn.tuning import Measured, Place, request_of, with_lengths
from polyattn.tuning.known import shipped, shipped_rates, shipped_rows, shipped_samples
from polyattn.tuning.predicted import Model

ALL = "all"
FEW = ("driver", "polyattn", "torch", "triton")
"""Of the distributions that took part in a measurement, those of a machine with no library of kernels."""
LOW = 0.85
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
    models: dict[tuple[int, ...], Model | None] = {}
    for key, measurements in shipped(lambda: place).tables.measured.items():
        fields = json.loads(key)
        request = dataclasses.replace(request_of(fields), platform=platform, arch=place.arch).normalised()
        if (shape := shape_of(fields)) not in models:
            models[shape] = without(shape, place)
        for one in measurements.values():
            asked = with_lengths(request, *one.lengths)
            usual = select(asked, there, Policy(), full=True)
            rule, served = known_as(served_by(usual), one), {usual.backend, *usual.others, *usual.rewritable}
            one = dataclasses.replace(one, times={n: time for n, time in one.times.items() if parts(n)[0] in served})
            if rule not in one.times:
                continue
            said = select(asked, there, shipped_policy(Policy(), asked, own=False, place=place))
            unseen = known_as(served_by(said), one) or rule
            model = models[shape]
            times = model.at(asked, fields, one.lengths) if model else None
            said = select(asked, there, policy_of(Policy(), asked, times) if times else Policy())
            predicted = known_as(served_by(said), one) or rule
            yield {
                "kind": kind_of(request),
                "request": request.summary().replace(f" {platform}:{place.arch},", ""),
                "lengths": list(one.lengths),
                "rules": [rule, speed(one, rule)],
                "unseen": [unseen, speed(one, unseen)],
                "model": [predicted, speed(one, predicted)],
                "predicted": said.source == "cost model",
            }


def shape_of(key: Mapping[str, Any]) -> tuple[int, ...]:
    """What makes a request that of a model: its heads and how wide they are."""
    request = request_of(key)
    return request.heads, request.kv_heads, request.head_dim


def without(shape: tuple[int, ...], place: Place) -> Model | None:
    """The cost model of a device that has seen nothing of a model."""
    rows = [row for row in (*shipped_rows(), *shipped_samples()) if shape_of(row.key["request"]) != shape]
    return Model.of(rows, shipped_rates(), place.device, place.arch)


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
    """By device and by what is installed."""
    libraries: dict[tuple[str, str], dict[str, str]] = {}
    for row in shipped_rows():
        libraries.setdefault((row.place.device, row.place.arch), {}).update(row.place.versions)
    found = {}
    for (device, arch), versions in sorted(libraries.items()):
        place, few = Place(device, arch), {name: versions[name] for name in FEW if name in versions}
        found[device] = {
            "all libraries": list(choices(place, catalogue(versions))),
            "Triton and PyTorch": list(choices(place, catalogue(few))),
        }
    return found


def figures(rows: Sequence[Mapping[str, Any]], who: str) -> list[str]:
    """The geometric mean, the least, and how many are low."""
    found = [row[who][1] for row in rows]
    low = sum(one < LOW for one in found)
    return [f"{math.exp(sum(map(math.log, found)) / len(found)):.3f}", f"{min(found):.2f}", str(low)]


def markdown(result: dict[str, Any]) -> str:
    tables = []
    whos = ("rules alone", "without it", "cost model alone")
    head = ["requests", "measured", *(word for who in whos for word in (who, "least", f"below {LOW}"))]
    for device, installed in result["devices"].items():
        for libraries, rows in installed.items():
            kinds = {kind: [r for r in rows if r["kind"] == kind] for kind in sorted({r["kind"] for r in rows})}
            lines = [f"{device}, {libraries}:", "", f"| {' | '.join([*head, 'predicted'])} |"]
            lines.append(f"|---|{'---:|' * len(head)}")
            for kind, some in {ALL: rows, **kinds}.items():
                cells = [kind, str(len(some))]
                cells += [cell for who in ("rules", "unseen", "model") for cell in figures(some, who)]
                cells.append(str(sum(row["predicted"] for row in some)))
                lines.append(f"| {' | '.join(cells)} |")
            tables.append("\n".join(lines))
    return "\n\n".join([f"{report.caption(result)}.", *tables])


def main() -> None:
    args = report.arguments(report.parser(__doc__), markdown)
    if args is not None:
        report.finish({**report.stamp("shipped-tables"), "devices": measure()}, markdown, args.json)


if __name__ == "__main__":
    main()
