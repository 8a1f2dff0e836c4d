"""How good choices and kernels are on shapes that nobody chose: a sheet of `random_sheet.py` on a GPU, in minutes.

    python benchmarks/random_sheet.py 71 72 73 --rows 2 --out random.yaml
    FLASHINFER_DISABLE_JIT=1 python benchmarks/random_shapes.py random.yaml --processes 14 --json FILE
    python benchmarks/random_shapes.py --render FILE     # a result file as the tables of docs/benchmarks.md

It is `polyattn bench` in little, for a machine that is there for minutes only: processes side by side compile all
kernels and check all results first, in the places where kernels differ, and one process then times what was right, in
rounds. The first rounds are the measurement that a tuned choice is made by; what counts are the others. Of each row
there is who would be chosen, where everything that is here is installed and where only Triton and PyTorch are: by the
rules, by what plugins ship (on a device that none of it is of: the cost model), and by the first rounds. A call costs
what its device or its host takes longer for (`polyattn.tuning.Measured.costs`); one that is replayed costs its device's
time, and so does one whose host was not timed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import report
import torch

from polyattn.bench import Row, peers
from polyattn.bench.bars import OWN
from polyattn.bench.entries import Entry, Seen, entries_of
from polyattn.bench.measure import Inputs, Workload, examine
from polyattn.bench.measure.clock import Clock, Timing, interleaved
from polyattn.bench.sheets import read
from polyattn.bench.workloads import inputs_of, workload
from polyattn.errors import BackendUnavailableError, PolyattnError, UnsupportedRequestError
from polyattn.registry.manager import get_manager
from polyattn.selection.inspection import catalogue, served_by
from polyattn.selection.select import Catalogue, Choice, Policy, Selection, select
from polyattn.selection.tuned_policy import shipped_policy, tuning_place
from polyattn.tuning import backend_row
from polyattn.tuning.times import SAME

PEERS = str(Path(__file__).parent / "peers")
LEFT_OUT = ("flex_attention", "fla", "fa4", "flashinfer_cascade")
"""FlexAttention compiles for many seconds a row, and was nowhere within 20% of the fastest of 89 rows of models; the
others are not installed, or serve none of these rows."""
_CANDIDATES = ("[!f]*", "fa*", "flash*", "triton")
"""All that may be chosen by themselves but FlexAttention; Triton also where it may not."""
FEW = ("polyattn", "polyattn-cuda", "polyattn-triton", "torch", "triton")
INSTALLED = ("everything here", "Triton and PyTorch")
HOW = ("rules", "model", "tuned")
"""Choices: by the rules of the platform; by the cost model; by the first rounds."""
TRIED, ROUNDS = 3, 6
LOW, WORST = 0.85, 0.75
_WINDOW, _ISSUED = 0.004, 9
_NEAR = 2.0
"""Times slower than the fastest, and nobody asks for more rounds."""


def rows_of(sheet: Path) -> list[Row]:
    """The rows in turn by family, so that a run that is cut short has some of each."""
    found = [(number, row) for family in read([sheet]).families for number, row in enumerate(family.rows)]
    return [row for _, row in sorted(found, key=lambda one: one[0])]


def entrants(asked: Workload, device: torch.device) -> list[Entry]:
    """Who may be chosen for a row, and the libraries called by hand."""
    listed = {name: peer for name, peer in peers.load([PEERS]).items() if name not in LEFT_OUT}
    return entries_of(asked, device, listed, _CANDIDATES, Seen())


# -------------------------------------------------------------------------------------------------- compiled, checked


def checked(row: Row, device: torch.device) -> dict[str, str]:
    """Entry -> what is wrong with it, "" nothing; everything is compiled by the way."""
    asked = workload(row, device)
    inputs = inputs_of(row, asked, device, sets=1)
    found = {}
    for one in entrants(asked, device):
        said = examine(inputs, one)
        found[one.name] = f"{said.kind}: {said.reason}" if said.kind else ""
    return found


def check_share(sheet: Path, share: int, of: int, out: Path, device: torch.device) -> None:
    """Check a share of the rows; the file grows by a line for each."""
    for number, row in enumerate(rows_of(sheet)):
        if number % of == share:
            try:
                found: dict[str, Any] = {"row": row.id, "said": checked(row, device)}
            except (PolyattnError, RuntimeError) as exc:
                found = {"row": row.id, "said": {}, "note": f"{type(exc).__name__}: {exc}"[:300]}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def check_all(sheet: Path, processes: int, within: float, device: torch.device, folder: Path) -> dict[str, Any]:
    """Row -> what became of its entries. What is not checked `within` so many seconds is not timed."""
    began = time.monotonic()
    files = [folder / f"checked-{share}.jsonl" for share in range(processes)]
    workers = []
    for share, file in enumerate(files):
        words = [str(sheet), "--share", str(share), "--processes", str(processes), "--json", str(file)]
        workers.append(subprocess.Popen([sys.executable, __file__, *words, "--device", str(device)]))
    for worker in workers:
        try:
            worker.wait(max(within - (time.monotonic() - began), 0.1))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    lines = [line for file in files if file.exists() for line in file.read_text(encoding="utf-8").splitlines()]
    print(f"checked {len(lines)} rows in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return {one["row"]: one for one in map(json.loads, lines)}


# --------------------------------------------------------------------------------------------------------------- timed


def measured(row: Row, said: Mapping[str, str], clock: Clock, tried: int, rounds: int) -> dict[str, Any]:
    """A row: microseconds by entry, in the first rounds and in those that count; choices by what is installed."""
    device = clock.device
    asked = workload(row, device)
    inputs = inputs_of(row, asked, device)
    going = [one for one in entrants(asked, device) if said.get(one.name, "not checked") == ""]
    gone = {name: why for name, why in said.items() if why}
    timings: dict[str, Timing] = {}
    issued: dict[str, Callable[[], float]] = {}
    for one in going:
        try:
            timings[one.name], took = _timing(one, inputs, clock, recorded=row.recorded)
            if took is not None and one.selection is not None:
                issued[one.name] = took
        except Exception as exc:  # noqa: BLE001 - a library may raise anything
            gone[one.name] = f"failed: {type(exc).__name__}: {exc}"[:200]
    host = {name: took() for name, took in issued.items()}
    first = {name: one.seconds for name, one in interleaved(timings, tried, settle=False).items()}
    near = [name for name in timings if first[name] <= _NEAR * min(first.values())]
    own = [one for one in going if one.selection is not None and one.name in first]
    kept = {*near, OWN + "triton"}  # whose figures are told of every row
    costs = {name: max(time, host.get(name, 0.0)) for name, time in first.items()}
    chosen = {where: choices(asked, there, own, costs) for where, there in _machines().items()}
    kept |= {name for how in chosen.values() for name in how.values() if name in timings}
    again = interleaved({name: timings[name] for name in timings if name in kept}, rounds, settle=False)
    # The least of what was timed at two times: the host is now and then taken away for longer than a call.
    host |= {name: min(host[name], issued[name]()) for name in kept if name in host}
    us = {name: round(one.seconds * 1e6, 3) for name, one in again.items()}
    us |= {name: round(seconds * 1e6, 3) for name, seconds in first.items() if name not in us}
    work = row.work()
    rule = next((one for one in own if one.name == chosen[INSTALLED[0]].get("rules")), None)
    table = {one.name.removeprefix(OWN): us[one.name] for one in own if _may(one)}
    by = {one.name.removeprefix(OWN): one.what.kind for one in own if _may(one)}  # type: ignore[union-attr]
    written = backend_row(
        tuning_place(asked.request.platform, device), asked.request, asked.buckets, table, "random_shapes",
        rule=rule.name.removeprefix(OWN) if rule else "", by=by,
    ) if table else None  # fmt: skip
    return {
        "family": row.family, "row": row.name, "model": row.model, "kind": row.kind, "fields": row.fields(),
        "operations": work.operations, "bytes": work.bytes, "us": us,
        "first": {name: round(seconds * 1e6, 3) for name, seconds in first.items()},
        "host": {name: round(seconds * 1e6, 3) for name, seconds in host.items()},
        "few": sorted(_few(own, asked)), "choice": chosen, "gone": gone,
        "measurement": written.plain() if written else None,
    }  # fmt: skip


def _timing(one: Entry, inputs: Inputs, clock: Clock, *, recorded: bool) -> tuple[Timing, Callable[[], float] | None]:
    """What times it, and what says how many seconds pass until a call returns; None of calls that are replayed."""
    call = one.what.prepare(inputs)
    calls = [functools.partial(call, number) for number in range(inputs.count)]
    if recorded:
        return clock.graph(calls)[0], None
    clock.issues(calls[:2])

    def issued() -> float:
        return min(clock.issues([calls[i % len(calls)] for i in range(_ISSUED)]).seconds for _ in range(2))

    return functools.partial(clock.calls, calls), issued


@functools.lru_cache(maxsize=1)
def _machines() -> dict[str, Catalogue]:
    """This machine, and one with Triton and PyTorch alone."""
    from polyattn.registry.distributions import distribution_version

    few = {name: version for name in FEW if (version := distribution_version(name))}
    return dict(zip(INSTALLED, (catalogue(), catalogue({**dict.fromkeys(FEW, ""), **few})), strict=True))


def _may(one: Entry) -> bool:
    """It is no last resort, and may be chosen without being named."""
    assert one.selection is not None
    return (get_manager().backends[one.selection.backend, one.selection.platform].priority or 0) >= 0


def _few(own: Sequence[Entry], asked: Workload) -> set[str]:
    """Candidates that a machine with Triton and PyTorch alone has too."""
    found = set()
    for one in own:
        assert one.selection is not None
        try:
            there = select(
                asked.request, _machines()[INSTALLED[1]], Policy(Choice(one.selection.backend, "asked"), strict=True)
            )
        except PolyattnError:
            continue
        if _key(there) == _key(one.selection):
            found.add(one.name)
    return found


def choices(asked: Workload, there: Catalogue, own: Sequence[Entry], costs: Mapping[str, float]) -> dict[str, str]:
    """Who is chosen, by `HOW`. costs: of the first rounds."""
    names = {_key(one.selection): one.name for one in own if one.selection is not None}
    try:
        said = {
            "rules": select(asked.request, there, Policy()),
            "model": select(asked.request, there, shipped_policy(Policy(), asked.request, own=False)),
        }
    except (UnsupportedRequestError, BackendUnavailableError):
        return {}
    found = {how: names.get(_key(one), OWN + served_by(one).partition("@")[0]) for how, one in said.items()}
    found["source"] = said["model"].source
    installed = [
        one.name for one in own if _may(one) and (there is _machines()[INSTALLED[0]] or one.name in _few(own, asked))
    ]
    # As `polyattn.tuning.ranked`: who would be chosen anyway stays unless another is faster by more than that.
    best = min(installed, key=lambda name: costs[name], default="")
    if best:
        rule = found["rules"]
        found["tuned"] = rule if rule in installed and costs[rule] <= SAME * costs[best] else best
    return found


def _key(selection: Selection | None) -> tuple[Any, ...]:
    assert selection is not None
    return selection.id, selection.provider, selection.lowerings


# ------------------------------------------------------------------------------------------------------------- figures


def speeds(row: Mapping[str, Any], where: str, how: str) -> float | None:
    """Of a choice beside the fastest candidate that is installed."""
    few, host = set(row["few"]), row.get("host", {})
    able = {
        name: max(time, host.get(name, 0.0))
        for name, time in row["us"].items()
        if name.startswith(OWN) and (where == INSTALLED[0] or name in few)
    }
    name = row["choice"][where].get(how, "")
    return min(able.values()) / able[name] if name in able else None


def over_libraries(row: Mapping[str, Any]) -> float | None:
    """Our Triton kernels beside the fastest library, through polyattn or called by hand."""
    mine = row["us"].get(OWN + "triton")
    others = [
        time for name, time in row["us"].items() if name != OWN + "triton" and not name.startswith(OWN + "torch_native")
    ]
    return min(others) / mine if mine and others else None


def low_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Who is below `LOW` where: the row, whose figure it is, and the time that it is of, in microseconds."""
    for row in rows:
        one, us = f"{row['family'].removeprefix('random_')}: {row['row']}, {row['model']}", row["us"]
        ratio, mine = over_libraries(row), OWN + "triton"
        if ratio is not None and ratio < LOW:
            first = row["first"].get(mine, us[mine])
            yield [one, "our Triton kernels", f"triton {us[mine]:.0f} (first rounds: {first:.0f})", f"{ratio:.2f}"]
        for where in INSTALLED:
            ratio = speeds(row, where, "model") if row["choice"][where] else None
            if ratio is not None and ratio < LOW:
                name = row["choice"][where]["model"]
                time = max(us[name], row.get("host", {}).get(name, 0.0))
                yield [one, f"the cost model, {where}", f"{name.removeprefix(OWN)} {time:.0f}", f"{ratio:.2f}"]


def figures(found: Sequence[float]) -> list[str]:
    if not found:
        return ["0", "", "", "", ""]
    mean = math.exp(math.fsum(map(math.log, found)) / len(found))
    low = [str(sum(one < limit for one in found)) for limit in (LOW, WORST)]
    return [str(len(found)), f"{mean:.3f}", f"{min(found):.2f}", *low]


def markdown(result: dict[str, Any]) -> str:
    rows = [row for row in result["rows"] if row.get("us")]
    head = f"rows | geometric mean | least | below {LOW} | below {WORST} |"
    gone = (
        f"; of {len(result['rows'])} rows {len(rows)} were checked in time" if len(rows) < len(result["rows"]) else ""
    )
    lines = [
        f"{report.caption(result)}{gone}.",
        "",
        f"| installed | choice | {head}",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    words = {"rules": "`--rules seed`", "model": "the cost model", "tuned": "tuned"}
    for where in INSTALLED:
        for how in HOW:
            found = [one for row in rows if row["choice"][where] and (one := speeds(row, where, how)) is not None]
            lines.append(f"| {where} | {words[how]} | {' | '.join(figures(found))} |")
    lines += ["", f"| our Triton kernels over the fastest library | {head}", f"|---{'|---:' * 5}|"]
    families = {"all but training": [row for row in rows if row["kind"] != "training"]}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    for name, some in families.items():
        found = [one for row in some if (one := over_libraries(row)) is not None]
        lines.append(f"| {name.removeprefix('random_')} | {' | '.join(figures(found))} |")
    lines += ["", f"| row below {LOW} | of | us | times as fast |", "|---|---|---:|---:|"]
    lines += [f"| {' | '.join(cells)} |" for cells in low_rows(rows)]
    return "\n".join(lines)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("sheet", type=Path, nargs="?")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="that compile and check, side by side")
    parser.add_argument("--within", type=float, default=120, metavar="S", help="seconds for that (default: 120)")
    parser.add_argument("--limit", type=float, default=3600, metavar="S", help="seconds after which no row is begun")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = report.arguments(parser, markdown)
    if args is None:
        return
    if args.sheet is None:
        parser.error("name a sheet: python benchmarks/random_sheet.py SEED --out FILE makes one")
    began, device = time.monotonic(), torch.device(args.device)
    if args.share is not None:
        check_share(args.sheet, args.share, args.processes, args.json, device)
        return
    with tempfile.TemporaryDirectory() as folder:
        said = check_all(args.sheet, args.processes, args.within, device, Path(folder))
    rows: list[dict[str, Any]] = []
    result = {**report.stamp("random-shapes", device), "rows": rows}
    clock = Clock(device, _WINDOW)
    for row in rows_of(args.sheet):
        if time.monotonic() - began > args.limit:
            break
        one = said.get(row.id, {"said": {}, "note": "not checked in time"})
        try:
            found = measured(row, one["said"], clock, TRIED, ROUNDS) if one["said"] else {"note": one.get("note", "")}
        except (PolyattnError, RuntimeError) as exc:
            found = {"note": f"{type(exc).__name__}: {exc}"[:300]}
        rows.append({"family": row.family, "row": row.name, "kind": row.kind, **found})
        report.save(result, args.json)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report.finish(result, markdown, args.json)


if __name__ == "__main__":
    main()
