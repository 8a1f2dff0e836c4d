"""polyattn's attention kernels beside the libraries they compete with, on one GPU, and what they must reach.

    python benchmarks/attention_kernels.py --json FILE                        # the whole sheet, every peer that is here
    python benchmarks/attention_kernels.py --rows 'decode*,extend' --peers 'fa3,flashinfer*' --compile 12
    python benchmarks/attention_kernels.py --merge A.json B.json --json FILE  # peers that cannot be in one process
    python benchmarks/attention_kernels.py --render FILE                      # a result file as tables
    python benchmarks/attention_kernels.py --dry-run                          # on the CPU, as small as it can be

The rows, the peers of each and the bars are in attention_kernels.yaml. Every result is checked against float64 first,
in rows that stand for all of it, and one that fails is not timed. Inputs change from call to call and do not fit in the
L2 cache; decode is replayed from a recorded graph; times are medians of device events. A family of rows is one part of
a run: matmul, copy and read rates of the device are measured at both its ends, and a part whose ends differ is
rejected. What a library cannot do, or fails at, is in the result with its reason.
"""

from __future__ import annotations

import fnmatch
import functools
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peers
import report
import torch
from measuring import sheet as sheets
from measuring.sheet import OWN, Family, Row, Sheet
from measuring.verdicts import ANCHORS, best_peer, difference, fields_of, usable, verdicts

from polyattn.testing.machine import device_name, versions

if TYPE_CHECKING:
    import argparse

    from measuring.clock import Timer
    from measuring.problems import Problem

SHEET = Path(__file__).with_suffix(".yaml")
ATTEMPTS = 2
"""Times a part is measured before its rejection stands."""
WORKER_SECONDS = 200
"""How long the processes that compile ahead may take."""


class WrongResultError(Exception):
    """A result is further from float64 than the sheet tolerates."""


class DeviceLostError(Exception):
    """An entry left the device unusable for this process."""


def arguments() -> argparse.Namespace | None:
    parser = report.parser(__doc__)
    parser.add_argument("--rows", default="*", help="families, or FAMILY/NAME of rows, by comma; * is anything")
    parser.add_argument("--peers", default="*", help="entries beside polyattn's own, by comma; '' for none")
    parser.add_argument("--own", default="triton", metavar="BACKEND", help="the polyattn backend (default: triton)")
    parser.add_argument("--seconds", type=float, default=0.08, help="measuring time of an entry (default: 0.08)")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which no further part is begun")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="compile ahead, in N processes")
    parser.add_argument("--versions", default="", metavar="NAME=VERSION,...", help="of peers that do not tell theirs")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes: the times mean nothing")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="put result files together; run nothing")
    parser.add_argument("--resume", action="store_true", help="go on with the result file of --json")
    parser.add_argument("--share", help=report.argparse.SUPPRESS)
    return report.arguments(parser, markdown)


def wanted_peers(patterns: str) -> list[str]:
    """The entries that `--peers` names.

    Raises:
        SystemExit: a pattern that names none.
    """
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    if wrong := [pattern for pattern in wanted if not fnmatch.filter(peers.ENTRIES, pattern)]:
        raise SystemExit(f"--peers {wrong[0]!r} names no entry; there are {', '.join(peers.ENTRIES)}")
    return [name for name in peers.ENTRIES if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)]


# --------------------------------------------------------------------------------------------------------- measuring


class Run:
    """One process of measuring: the device, what is selected, and the result so far."""

    def __init__(self, args: argparse.Namespace, sheet: Sheet, families: Sequence[Family]) -> None:
        from measuring.clock import Timer  # after TRITON_INTERPRET is settled

        self.args, self.sheet, self.families = args, sheet, families
        self.device = torch.device("cpu" if args.dry_run else "cuda")
        self.timer: Timer = Timer(self.device, args.seconds)
        self.peers = wanted_peers(args.peers)
        told = dict(pair.split("=", 1) for pair in args.versions.split(",") if pair)
        self.result: dict[str, Any] = {
            **report.stamp("attention-kernels"),
            "machine": device_name(self.device),
            "versions": {**versions(self.device), **_cudnn(), **peers.versions(), **told},
            "sheet": sheet.digest,
            "own": args.own,
            "dry_run": args.dry_run,
            "began": time.time(),
            "lost": {},
            "not_begun": [],
            "parts": [],
        }
        if args.resume:
            self.result = json.loads(args.json.read_text())

    def all(self) -> None:
        done = {part["family"] for part in self.result["parts"]}
        self.result["not_begun"] = []
        for family in self.families:
            if family.name in done:
                continue
            if time.time() - self.result["began"] > self.args.limit:
                self.result["not_begun"].append(family.name)
                continue
            part: dict[str, Any] = {}
            for _ in range(ATTEMPTS):
                part = self.part(family)
                if part["accepted"]:
                    break
            self.result["parts"].append(part)
            self.save()

    def part(self, family: Family) -> dict[str, Any]:
        from measuring.anchors import anchors

        began, start = time.perf_counter(), anchors(self.timer)
        rows = [self.row(row) for row in family.rows]
        end = anchors(self.timer)
        off = difference(start, end)
        accepted = off <= self.sheet.anchors_within or self.args.dry_run
        seconds = round(time.perf_counter() - began, 1)
        print(f"-- {family.name}: {seconds} s, anchors {start} to {end}{'' if accepted else ', REJECTED'}", flush=True)
        return {
            "family": family.name,
            "run": 0,
            "accepted": accepted,
            "seconds": seconds,
            "anchors": {"start": start, "end": end, "difference": round(off, 4)},
            "rows": rows,
        }

    def row(self, row: Row) -> dict[str, Any]:
        from measuring.problems import problem_of

        names = [name for name in [OWN, *row.peers] if name in (OWN, *self.peers)]
        try:
            problem = problem_of(row.tiny() if self.args.dry_run else row, self.device)
        except torch.OutOfMemoryError as exc:
            entries = {name: {"failed": f"no room for the problem: {exc}"} for name in names}
        else:
            entries = {name: self.entry(problem, row, name) for name in names}
            del problem
        self._free()
        said = [f"{name} {e['rate']:.0f}" if "us" in e else f"{name} -" for name, e in entries.items()]
        print(f"{row.family}/{row.name} [{row.unit}]: {', '.join(said)}", flush=True)
        return {
            "family": row.family,
            "name": row.name,
            "run": 0,
            "fields": fields_of(row),
            "unit": row.unit,
            "entries": entries,
        }

    def entry(self, problem: Problem, row: Row, name: str) -> dict[str, Any]:
        """Times and errors of one entry, or {"failed": why}."""
        place = f"{row.family}/{row.name}/{name}"
        if place in self.result["lost"]:
            return {"failed": self.result["lost"][place]}
        if self.args.dry_run and name != OWN and peers.ENTRIES[name].compiles:
            return {"failed": "not compiled in a dry run"}
        try:
            return self._measured(problem, name)
        except ModuleNotFoundError as exc:
            return {"failed": f"not here: {exc}"}
        except Exception as exc:  # noqa: BLE001 - a library may raise anything; it is reported in its place
            reason = " ".join(f"{type(exc).__name__}: {exc}".split())[:400]
        print(f"   {place}: {reason}", flush=True)
        try:
            self.timer.synchronise()
            self._free()
        except RuntimeError as exc:
            self.result["lost"][place] = f"the device was lost: {reason}"
            raise DeviceLostError(place) from exc
        return {"failed": reason}

    def _measured(self, problem: Problem, name: str) -> dict[str, Any]:
        call, said = self.prepared(problem, name)
        calls = [functools.partial(call, number) for number in range(problem.sets)]
        if problem.row.recorded:
            timing, results = self.timer.graph(calls)
            result = results[0]
        else:
            timing, result = functools.partial(self.timer.calls, calls), call(0)
        whole, worst = problem.errors(result)
        limits = self.sheet.tolerance[problem.tolerance]
        if not (whole <= limits[0] and worst <= limits[1]):
            raise WrongResultError(f"{whole:.2g} from float64, {worst:.2g} in the worst row; not timed")
        found = timing()
        served = {"served_by": said()} if said else {}
        return {
            "us": round(found.seconds * 1e6, 3),
            "rate": round(problem.rate(found.seconds), 2),
            "spread": round(found.spread, 4),
            "count": found.count,
            "sets": problem.sets,
            "error": [round(whole, 6), round(worst, 6)],
            **served,
        }

    def prepared(self, problem: Problem, name: str) -> tuple[peers.Call, Callable[[], str] | None]:
        if name != OWN:
            return peers.ENTRIES[name].prepare(problem), None
        from peers.own import own

        return own(problem, self.args.own)

    def _free(self) -> None:
        gc.collect()
        if self.timer.on_gpu:
            torch.cuda.empty_cache()

    def save(self) -> None:
        self.result["verdicts"] = verdicts(self.sheet, self.result["parts"])
        if self.args.json:
            self.args.json.write_text(json.dumps(self.result, indent=1) + "\n")


def _cudnn() -> dict[str, str]:
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {"cudnn": str(version)} if version else {}


# --------------------------------------------------------------------------------------------------- compiling ahead


def shares(families: Sequence[Family], names: Sequence[str], share: int, of: int) -> Iterator[tuple[Row, str]]:
    """What one of the processes that compile ahead calls: entries that compile, those that share kernels together."""
    seen: set[str] = set()
    for family in families:
        for row in family.rows:
            for name in [OWN, *(n for n in row.peers if n in names and peers.ENTRIES[n].compiles)]:
                # FlexAttention alone makes a program for each shape.
                kernel = (name, row.kind, row.dims, row.causal, row.page_size, row.kv_dtype, row.heads // row.kv_heads)
                key = repr((*kernel, row.name) if name == "flex_attention" else kernel)
                # polyattn's may differ with the lengths too; a library's need one call.
                if int(hashlib.sha256(key.encode()).hexdigest(), 16) % of == share and (name == OWN or key not in seen):
                    yield row, name
                seen.add(key)


def compile_share(run: Run) -> None:
    from measuring.problems import problem_of

    share, _, of = run.args.share.partition("/")
    for row, name in shares(run.families, run.peers, int(share), int(of)):
        try:
            problem = problem_of(row, run.device, sets=1)
            call, _ = run.prepared(problem, name)
            call(0)
            run.timer.synchronise()
        except Exception as exc:  # noqa: BLE001 - the measuring process meets it again and reports it
            print(f"   ahead, {row.family}/{row.name}/{name}: {type(exc).__name__}: {exc}"[:300], flush=True)
        problem = call = None
        run._free()


def compile_ahead(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    words = ["--rows", args.rows, "--peers", args.peers, "--own", args.own]
    alone = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([sys.executable, __file__, *words, "--share", f"{i}/{args.compile}"], env=alone)
        for i in range(args.compile)
    ]
    for worker in workers:
        try:
            worker.wait(max(WORKER_SECONDS - (time.perf_counter() - began), 0.1))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
            print("a process that compiles ahead was stopped; the rest is compiled when it is needed", flush=True)
    print(f"-- compiled ahead in {time.perf_counter() - began:.0f} s", flush=True)


# ------------------------------------------------------------------------------------------------- merging, rendering


def merged(paths: Sequence[Path], sheet: Sheet) -> dict[str, Any]:
    """Several result files as one: peers that cannot be in one process, or parts that were measured again.

    Raises:
        SystemExit: they are of different sheets, devices or backends.
    """
    found = [json.loads(path.read_text()) for path in paths]
    for name, wanted in (("sheet", sheet.digest), ("machine", found[0]["machine"]), ("own", found[0]["own"])):
        if wrong := [str(p) for p, result in zip(paths, found, strict=True) if result[name] != wanted]:
            raise SystemExit(f"{', '.join(wrong)}: {name} is not {wanted!r}, so it says nothing beside the others")
    result = {**found[0], "versions": {}, "lost": {}, "not_begun": [], "parts": []}
    for number, one in enumerate(found):
        result["versions"] |= one["versions"]
        result["lost"] |= one["lost"]
        result["not_begun"] += one["not_begun"]
        for part in one["parts"]:
            rows = [{**row, "run": number} for row in part["rows"]]
            result["parts"].append({**part, "run": number, "rows": rows})
    result["command"] = "; ".join(one["command"] for one in found)
    result["date"] = max(one["date"] for one in found)
    result["verdicts"] = verdicts(sheet, result["parts"])
    return result


def markdown(result: dict[str, Any]) -> str:
    """A result file as text: the bars, then a table for each family."""
    lines = summary(result)
    for name in dict.fromkeys(part["family"] for part in result["parts"]):
        lines += ["", *_table(name, [part for part in result["parts"] if part["family"] == name])]
    return "\n".join(lines)


def summary(result: dict[str, Any]) -> list[str]:
    """The run, and the bars."""
    lines = [f"{report.caption(result)}.", ""]
    if result["dry_run"]:
        lines += ["A dry run: the times mean nothing.", ""]
    if result["not_begun"]:
        lines += [f"Not begun within the time limit: {', '.join(result['not_begun'])}.", ""]
    ends = [part["anchors"][end] for part in result["parts"] for end in ("start", "end")]
    if ends and not result["dry_run"]:
        rates = {name: [end[name] for end in ends] for name in ANCHORS}
        said = (f"{name} {min(all_):.0f} to {max(all_):.0f} {ANCHORS[name]}" for name, all_ in rates.items())
        lines += [f"The device, over all parts: {', '.join(said)}.", ""]
    lines += ["| bar | asked | verdict | geometric mean | least | of row |", "|---|---|---|---:|---:|---|"]
    for said in result["verdicts"]:
        verdict = said["verdict"]
        if "spread" in said:
            verdict += f" ({said['spread']:.1%})"
        if said["missing"]:
            verdict += f", {len(said['missing'])} of {len(said['missing']) + said['rows']} rows missing"
        if said.get("without") and said["rows"]:
            verdict += f", without {', '.join(said['without'])}"
        figures = [f"{said[name]:.2f}" if name in said else "" for name in ("geomean", "least")]
        cells = [said["bar"], said["asked"], verdict, *figures, said.get("least_row", "")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _table(family: str, parts: Sequence[dict[str, Any]]) -> list[str]:
    """A row that several runs measured shows the first rate of each entry; its ratio is of one part."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in (row for part in parts for row in part["rows"]):
        rows.setdefault(row["name"], []).append(row)
    names = list(dict.fromkeys(name for some in rows.values() for row in some for name in row["entries"]))
    rejected = sum(not part["accepted"] for part in parts)
    title = f"`{family}`, {parts[0]['rows'][0]['unit']}"
    title += f"; {rejected} of {len(parts)} parts rejected" if rejected else ""
    lines = [title, "", f"| row | {' | '.join(names)} | best peer |", f"|---|{'---:|' * len(names)}---|"]
    accepted = usable(parts)
    failures: dict[str, list[str]] = {}
    for name, some in rows.items():
        cells = []
        for entry in names:
            found = [row["entries"][entry] for row in some if entry in row["entries"]]
            rates = [one["rate"] for one in found if "us" in one]
            if found and not rates:
                failures.setdefault(f"{entry}: {found[0]['failed']}", []).append(name)
            cells.append(f"{rates[0]:.0f}" if rates else "-" if found else "")
        best = best_peer(row for row in accepted if row["name"] == name)
        lines.append(f"| {name} | {' | '.join(cells)} | {f'{best[1]:.2f} x {best[0]}' if best else ''} |")
    where = {why: "every row" if len(some) == len(rows) else "; ".join(some) for why, some in failures.items()}
    return [*lines, *([""] if where else []), *(f"- {why} ({some})" for why, some in where.items())]


def main() -> None:
    args = arguments()
    if args is None:
        return
    sheet = sheets.read(SHEET, peers.ENTRIES)
    if args.merge:
        report.finish(merged(args.merge, sheet), markdown, args.json)
        return
    if args.resume and not args.json:
        raise SystemExit("--resume goes on with a result file: name it with --json")
    families = sheets.selected(sheet, [pattern.strip() for pattern in args.rows.split(",")])
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --dry-run shows on the CPU that everything is in place")
    run = Run(args, sheet, families)
    if args.share:
        compile_share(run)
        return
    if args.compile and not args.dry_run and not args.resume:
        compile_ahead(args)
    try:
        run.all()
    except DeviceLostError as exc:
        run.save()
        if not args.json:
            raise SystemExit(f"the device was lost at {exc}; with --json the run goes on without it") from exc
        print(f"the device was lost at {exc}; going on in a new process without it", flush=True)
        again = [word for word in sys.argv if word != "--resume"]
        os.execv(sys.executable, [sys.executable, *again, "--resume"])
    run.save()
    print("\n".join(summary(run.result)))


if __name__ == "__main__":
    main()
