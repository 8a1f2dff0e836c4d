"""What random shapes showed on a device, as a table of measurements that a plugin ships for the cost model.

    python benchmarks/sample_table.py benchmarks/results/random-shapes.json --stale random_packed random_extend \\
        --out plugins/cuda/src/polyattn_cuda/measurements/nvidia-h100.json

Every row of `random_shapes.py` that was timed is one measurement, with its device, versions and date. Times that the
first rounds and those that count do not agree on are left out: something else than the kernel was timed in one of them.
Of several result files the last counts where they have the same row. The table is a sample (docs/tuning.md,
"Measurements in a package"): it teaches the cost model and answers no request by itself, and its lengths are those that
were drawn, not rounded. A run that has other times writes the table anew. Families in which a backend has other kernels
since are left out whole (`--stale`): without that backend's times their rows would say that the next is the fastest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    host = {name.removeprefix(OWN): time for name, time in row.get("host", {}).items()}
    times = {name: time for name, time in found.value["times"].items() if name not in _left_out(row)}
    best = found.value["backend"] if found.value["backend"] in times else min(times, key=lambda name: times[name])
    by = {name: kind for name, kind in found.value.get("by", {}).items() if name in times}
    value = {**found.value, "backend": best, "times": times, **({"by": by} if by else {})}
    if kept := {name: host[name] for name in value["times"] if name in host}:
        value["host"] = kept
    key = {**found.key, "batch": batch, "q": s_q, "k": s_k}
    return dataclasses.replace(found, key=key, value=value, microseconds=times[best])


def table(results: Iterable[Mapping[str, Any]], stale: Collection[str] = ()) -> dict[str, Any]:
    """The rows of result files as a file of measurements, without those of families that are `stale`."""
    rows = (row for result in results for row in timed(result) if row["family"] not in stale)
    found = {(row["family"], row["row"]): measurement(row) for row in rows}
    return {"format": FORMAT, "sample": True, "measurements": [one.plain() for one in found.values()]}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="files of random_shapes.py --json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table")
    parser.add_argument("--stale", nargs="+", default=[], metavar="FAMILY", help="rows to leave out")
    args = parser.parse_args(words)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    families = {row["family"] for result in results for row in result["rows"] if "family" in row}
    if unknown := set(args.stale) - families:
        parser.error(f"--stale {' '.join(sorted(unknown))}: the families are {', '.join(sorted(families))}")
    made = table(results, args.stale)
    if not made["measurements"]:
        parser.error(f"{', '.join(map(str, args.results))}: no row was timed; run benchmarks/random_shapes.py again")
    args.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(made['measurements'])} measurements")


if __name__ == "__main__":
    main()
