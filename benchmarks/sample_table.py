"""What random shapes showed on a device, as a table of measurements that a plugin ships for the cost model.

    python benchmarks/sample_table.py benchmarks/results/random-shapes-71.json benchmarks/results/random-shapes.json \\
        --stale random-shapes-71:random_packed random-shapes-71:random_extend \\
        --out plugins/cuda/src/polyattn_cuda/measurements/nvidia-h100.json

Every row of `random_shapes.py` that was timed is one measurement, with its device, versions and date. Times that the
first rounds and those that count do not agree on are left out: something else than the kernel was timed in one of them.
Of several result files the last counts where they have the same row. The table is a sample (docs/tuning.md,
"Measurements in a package"): it teaches the cost model and answers no request by itself, and its lengths are those that
were drawn, not rounded. A run that has other times writes the table anew. Families and rows of a file in which a
backend has other kernels since are left out whole (`--stale`): without that backend's times they would say that the
next is the fastest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polyattn.bench import Row
from polyattn.bench.bars import OWN
from polyattn.bench.workloads import workload
from polyattn.tuning.rows import Row as Measurement
from polyattn.tuning.rows import row_of
from polyattn.tuning.store import FORMAT

STEADY = 1.25
"""Times of the first rounds and of those that count are further apart than this factor: neither is one."""


def unsteady(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Candidates of a timed row whose times disagree: microseconds in the first rounds and in those that count."""
    pairs = {name: (row["first"].get(name, time), time) for name, time in row["us"].items() if name.startswith(OWN)}
    return {name: pair for name, pair in pairs.items() if max(pair) > STEADY * min(pair)}


def timed(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result file that have a measurement, and a steady time in it."""
    found = [row for row in result["rows"] if row.get("measurement")]
    return [row for row in found if set(row["measurement"]["value"]["times"]) - _left_out(row)]


def _left_out(row: Mapping[str, Any]) -> set[str]:
    return {name.removeprefix(OWN) for name in unsteady(row)}


def measurement(row: Mapping[str, Any]) -> Measurement:
    """A timed row with the lengths that were drawn, its steady times, and the host's of those that have one."""
    found = row_of(row["measurement"], row["row"])
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in row["fields"].items()}
    batch, s_q, s_k = workload(Row(family=row["family"], kind=row["kind"], **fields), torch.device("cpu")).extent
    host = {name.removeprefix(OWN): time for name, time in row.get("host", {}).items() if name.startswith(OWN)}
    times = {name: time for name, time in found.value["times"].items() if name not in _left_out(row)}
    best = found.value["backend"] if found.value["backend"] in times else min(times, key=lambda name: times[name])
    value = {**found.value, "backend": best, "times": times}
    if by := {name: kind for name, kind in value.pop("by", {}).items() if name in times}:
        value["by"] = by
    if kept := {name: host[name] for name in value["times"] if name in host}:
        value["host"] = kept
    key = {**found.key, "batch": batch, "q": s_q, "k": s_k}
    return dataclasses.replace(found, key=key, value=value, microseconds=times[best])


def fresh(results: Mapping[str, Mapping[str, Any]], stale: Collection[str] = ()) -> list[dict[str, Any]]:
    """The timed rows of result files by name, without what is `stale`: NAME:FAMILY, or NAME:ROW. Of the same row in
    several the last."""
    found = {
        (row["family"], row["row"]): row
        for name, result in results.items()
        for row in timed(result)
        if not {f"{name}:{row['family']}", f"{name}:{row['row']}"} & {*stale}
    }
    return list(found.values())


def table(results: Mapping[str, Mapping[str, Any]], stale: Collection[str] = ()) -> dict[str, Any]:
    """The rows that `fresh` leaves, as a file of measurements."""
    rows = [measurement(row).plain() for row in fresh(results, stale)]
    return {"format": FORMAT, "sample": True, "measurements": rows}


def results_in(parser: argparse.ArgumentParser) -> None:
    """Let a parser take result files, and what is stale in them."""
    parser.add_argument("results", type=Path, nargs="*", metavar="RESULT", help="files of random_shapes.py --json")
    parser.add_argument(
        "--stale", nargs="+", default=[], metavar="NAME:WHAT", help="a family or a row of file NAME.json to leave out"
    )


def results_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Mapping[str, Any]]:
    """The result files that a command line names, by name; an error of the parser where what is stale is not there, or
    nothing was timed."""
    if not args.results:
        parser.error("name a result file: python benchmarks/random_shapes.py SHEET --json FILE makes one")
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in args.results}
    if not fresh(results):
        parser.error(f"{', '.join(map(str, args.results))}: no row was timed; run benchmarks/random_shapes.py again")
    rows = [(name, row) for name, result in results.items() for row in result["rows"] if "family" in row]
    families = {f"{name}:{row['family']}" for name, row in rows}
    if unknown := set(args.stale) - families - {f"{name}:{row['row']}" for name, row in rows}:
        parser.error(
            f"--stale {' '.join(sorted(unknown))}: name a row, or one of the families {', '.join(sorted(families))}"
        )
    return results


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results_in(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table")
    args = parser.parse_args(words)
    made = table(results_of(parser, args), args.stale)
    args.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(made['measurements'])} measurements")


if __name__ == "__main__":
    main()
