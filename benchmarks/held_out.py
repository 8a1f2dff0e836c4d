"""How good the cost model chooses on a device for rows that it has not seen: random shapes, some of them held out.

    python benchmarks/held_out.py benchmarks/results/random-shapes-71.json benchmarks/results/random-shapes.json \\
        --json benchmarks/results/held-out.json
    python benchmarks/held_out.py --render FILE     # a result file as the tables of docs/benchmarks.md

The rows are those that `random_shapes.py` timed, without what is stale (`sample_table.py`). The model is made of the
tables that plugins ship, and of the rows that are not held out: none, those of the other seeds, those of the other
families. Each row is asked for in its fine buckets of lengths, as a call is. Calls are counted in two ways, in the
choice as in the verdict: the time of the device, as of a call that is recorded into a graph; that of the device or of
the host, whichever is longer, as of calls that are issued one by one. Where the run took no host's times, those of the
shipped tables count: the middle of a backend's in such requests. A row whose choice was not timed has no verdict; one
with times that the run's first rounds do not agree with is not counted (`sample_table.STEADY`). Nothing runs here, so
any machine gives the same figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import random_shapes
import report
import sample_table

from polyattn.bench.bars import OWN
from polyattn.contract import AttentionRequest
from polyattn.contract.names import parts
from polyattn.selection.inspection import catalogue, served_by
from polyattn.selection.select import Catalogue, Policy, select
from polyattn.selection.tuned_policy import policy_of
from polyattn.tuning import Measured, request_of, with_lengths
from polyattn.tuning.known import shipped_rates, shipped_rows
from polyattn.tuning.predicted import Model
from polyattn.tuning.rows import Row

RULES = "rules"
DEVICE, EITHER = COUNTED = ("the device", "device or host")
"""What a call costs."""
HELD: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "all": lambda row: "",
    "its seed": lambda row: str(row["model"]),
    "its family": lambda row: str(row["family"]),
}
"""What is held out with a row: the rows of which this is the same."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """A row of a result file: what the run wrote of it, its measurement at the lengths that were drawn, and the request
    of such a call."""

    row: Mapping[str, Any]
    measured: Row
    request: AttentionRequest

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Timed:
        """Read a row that has a measurement."""
        measured = sample_table.measurement(row)
        request = request_of(measured.key["request"])
        asked = dataclasses.replace(request, platform="cuda", arch=measured.place.arch).normalised()
        return cls(row, measured, with_lengths(asked, *(measured.key[name] for name in ("batch", "q", "k"))))

    def counted(self, what: str, table: Model | None) -> Timed:
        """The row with the host's times that count. table: that knows them where the run took none."""
        host = (self.row.get("host") or {}) if what == EITHER else {}
        if what == EITHER and not host and table is not None and (said := self.predicted(table)) is not None:
            host = {OWN + name: time for name, time in said.host.items() if OWN + name in self.row["us"]}
        return dataclasses.replace(self, row={**self.row, "host": host})

    def predicted(self, model: Model) -> Measured | None:
        """What a model says of the row's times."""
        asked = self.request
        return model.at(asked, self.measured.key["request"], (asked.batch_bucket, asked.q_bucket, asked.k_bucket))

    @property
    def machines(self) -> dict[str, Catalogue]:
        """What is installed, by name: all that was, and Triton and PyTorch alone."""
        versions = dict(self.measured.place.versions)
        few = {name: versions.get(name, "") for name in random_shapes.FEW}
        return dict(zip(random_shapes.INSTALLED, (catalogue(versions), catalogue(few)), strict=True))

    def choose(self, model: Model | None, there: Catalogue) -> str:
        """The entry that serves the row by a model's prediction; by the rules where that says nothing."""
        request, times = self.request, None if model is None else self.predicted(model)
        if times is not None and not self.row.get("host"):
            times = dataclasses.replace(times, host={})
        policy = Policy() if times is None else policy_of(Policy(), request, times)
        name = served_by(select(request, there, policy)).partition("@")[0]
        return OWN + (name if OWN + name in self.row["us"] else parts(name)[0])


def models(rows: Sequence[Timed], same: Callable[[Mapping[str, Any]], str]) -> dict[str, Model | None]:
    """The model of the rows' device without those of which something is the same, by what that is."""
    place = rows[0].measured.place
    found = {}
    for held in dict.fromkeys(same(one.row) for one in rows):
        seen = [one.measured for one in rows if same(one.row) != held]
        found[held] = Model.of([*shipped_rows(), *seen], shipped_rates(), place.device, place.arch)
    return found


def verdicts(rows: Sequence[Timed]) -> Iterator[dict[str, Any]]:
    """Of each row, of what is installed and of what is held out: who is chosen, and how fast beside the fastest."""
    made = {held: models(rows, same) for held, same in HELD.items()}
    table = made["all"][""]
    for one, what in ((row.counted(what, table), what) for row in rows for what in COUNTED):
        pairs = sample_table.unsteady(one.row).items()
        unsteady = ", ".join(f"{name.removeprefix(OWN)} {a:.0f} and {b:.0f} us" for name, (a, b) in pairs)
        for where, there in one.machines.items():
            for held in (RULES, *HELD):
                model = None if held == RULES else made[held][HELD[held](one.row)]
                chosen = one.choose(model, there)
                speed = random_shapes.speeds({**one.row, "choice": {where: {held: chosen}}}, where, held)
                yield {
                    "row": f"{one.row['family'].removeprefix('random_')}: {one.row['row']}, {one.row['model']}",
                    "counted": what,
                    "installed": where,
                    "held": held,
                    "chosen": chosen.removeprefix(OWN),
                    "speed": None if speed is None else round(speed, 4),
                    "unsteady": unsteady,
                }


def markdown(result: dict[str, Any]) -> str:
    head = f"rows | geometric mean | least | below {random_shapes.LOW} | below {random_shapes.WORST} |"
    lines = [
        f"{report.caption(result)}; rows of {result['device']}, timed on {result['timed']}.",
        "",
        f"| installed | counted | held out with a row | {head}",
        f"|---|---|---|{'---:|' * 5}",
    ]
    steady = [one for one in result["rows"] if not one["unsteady"] and one["speed"] is not None]
    kinds = [(where, what, held) for where in random_shapes.INSTALLED for what in COUNTED for held in (RULES, *HELD)]
    for kind in kinds:
        some = [one for one in steady if (one["installed"], one["counted"], one["held"]) == kind]
        cells = random_shapes.figures([one["speed"] for one in some])
        named = [*kind[:2], "no model: `--rules seed`" if kind[2] == RULES else kind[2]]
        lines.append(f"| {' | '.join([*named, *cells])} |")
    low = f"row below {random_shapes.LOW}, all held out or its seed"
    lines += ["", f"| {low} | installed | counted | held out | chosen | speed |", f"|{'---|' * 5}---:|"]
    for one in steady:
        if one["held"] not in (RULES, "its family") and one["speed"] < random_shapes.LOW:
            cells = [one[name] for name in ("row", "installed", "counted", "held", "chosen")]
            lines.append(f"| {' | '.join(cells)} | {one['speed']:.2f} |")
    lines += [
        "",
        "| not counted | first rounds, later ones | chosen, its seed held out | speed by the later |",
        "|---|---|---|---:|",
    ]
    for one in result["rows"]:
        kind = one["installed"], one["counted"], one["held"]
        if one["unsteady"] and kind == (random_shapes.INSTALLED[0], DEVICE, "its seed"):
            speed = "not timed" if one["speed"] is None else f"{one['speed']:.2f}"
            lines.append(f"| {one['row']} | {one['unsteady']} | {one['chosen']} | {speed} |")
    return "\n".join(lines)


def main() -> None:
    parser = report.parser(__doc__)
    sample_table.results_in(parser)
    args = report.arguments(parser, markdown)
    if args is None:
        return
    results = sample_table.results_of(parser, args)
    rows = [Timed.of(row) for row in sample_table.fresh(results, args.stale)]
    machines = sorted({result["machine"] for result in results.values()})
    if len(machines) > 1:
        parser.error(f"the results are of {' and '.join(machines)}: name those of one device")
    dates = sorted({result["date"] for result in results.values()})
    said = {**report.stamp("held-out"), "device": machines[0], "timed": " and ".join(dates)}
    report.finish({**said, "rows": list(verdicts(rows))}, markdown, args.json)


if __name__ == "__main__":
    main()
