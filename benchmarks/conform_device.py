"""Conformance of core's backends on an accelerator: the same cases and gates as everywhere, several processes at once.

    python benchmarks/conform_device.py --device cuda --dtypes bfloat16,float16 --out result.json

It needs torch for the device and polyattn (installed, or `PYTHONPATH=core/src`), nothing else. FlexAttention and our
own kernels (`--backends triton`) compile a program for each case, so the cases are dealt to worker processes. A kernel
that reads where it must not takes its process down, or the device with it: that case is a finding, and a new process
goes on after it. Nothing is left out silently; what was not run is listed. Exit code 0: all conform; 1: they do not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from polyattn.plugins import get_manager
from polyattn.testing import Report, record, run
from polyattn.testing.report import VERDICTS

BACKENDS = ("torch_sdpa", "flex_attention", "torch_native")
RESTARTS = 25
"""Processes that one share may cost before the rest of it is given up (and said to be)."""

PARTS = 4
"""Shares of a backend whose cases compile nothing: starting a process costs what some hundred cases cost."""

# Workers fill the machine; what each compiles, it compiles itself.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclasses.dataclass(frozen=True)
class Share:
    """Every `of`-th case of a backend from the `index`-th on; `start` and `stop` bound it further."""

    backend: str
    index: int
    of: int
    start: int = 0
    stop: int | None = None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="torch device (default: cuda)")
    parser.add_argument("--backends", default=",".join(BACKENDS), help=f"default: {','.join(BACKENDS)}")
    parser.add_argument("--dtypes", default="bfloat16,float16", help="default: bfloat16,float16")
    parser.add_argument("--level", choices=("quick", "full"), default="quick")
    parser.add_argument("--per-row", type=int, help="combinations for each capability row and dtype")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that one process may take")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    parser.add_argument("--record", type=Path, metavar="RESULT", help="write a result as evidence; run nothing")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def work(given: argparse.Namespace) -> None:
    """A worker process: run one share, write its report, and say before each case which one it is."""
    share = Share(**json.loads(given.share))
    trace = given.out.with_suffix(".trace")

    def progress(done: int, total: int, case: str) -> None:
        trace.write_text(json.dumps([share.start + done, case]))

    report = run(
        share.backend,
        device=given.device,
        dtypes=given.dtypes.split(","),
        level=given.level,
        per_row=given.per_row,
        progress=progress,
        shard=(share.index, share.of),
        start=share.start,
        stop=share.stop,
    )
    given.out.write_text(report.to_json())


def finish(given: argparse.Namespace, share: Share, folder: Path) -> list[dict[str, Any]]:
    """Run a share to its end, in as many processes as that takes: the reports of all of them."""
    reports: list[dict[str, Any]] = []
    waiting = [share]
    for number in range(RESTARTS):
        if not waiting:
            return reports
        now = waiting.pop(0)
        out = folder / f"{now.backend}-{now.index}-{number}.json"
        code, said = launch(given, now, out)
        if out.exists():
            report = json.loads(out.read_text())
            reports.append(report)
            ran = sum(report[verdict] for verdict in VERDICTS)
            if report["lost"]:
                reports[-1]["lost"] = ""
                waiting.append(dataclasses.replace(now, start=now.start + ran))
            continue
        trace = out.with_suffix(".trace")
        if not trace.exists():
            reports.append(broken(now, f"{now.backend}, share {now.index + 1} of {now.of}", code, said))
            return reports
        # The process died: its results are lost with it, so what came before the case is run again.
        at, case = json.loads(trace.read_text())
        reports.append(broken(now, case, code, said))
        if at > now.start:
            waiting.append(dataclasses.replace(now, stop=at))
        if now.stop is None or at + 1 < now.stop:
            waiting.append(dataclasses.replace(now, start=at + 1))
    if waiting:
        reason = f"{share.backend}, share {share.index + 1} of {share.of}: given up after {RESTARTS} processes"
        reports.append({"backend": share.backend, "findings": {reason: [f"not run: cases {waiting}"]}})
    return reports


def launch(given: argparse.Namespace, share: Share, out: Path) -> tuple[int, str]:
    """(exit code, the end of what it said) of a worker process."""
    command = [sys.executable, __file__, "--share", json.dumps(dataclasses.asdict(share)), "--out", str(out)]
    command += ["--device", given.device, "--dtypes", given.dtypes, "--level", given.level]
    command += ["--per-row", str(given.per_row)] if given.per_row else []
    try:
        done = subprocess.run(
            command,
            env={**ENVIRONMENT, **os.environ},
            capture_output=True,
            text=True,
            timeout=given.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"it took more than {given.timeout:.0f} s"
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


def broken(share: Share, case: str, code: int, said: str) -> dict[str, Any]:
    """The report of a process that did not come back with one."""
    return {"backend": share.backend, "findings": {case: [f"the process died with exit code {code}: {said}"]}}


def shares(given: argparse.Namespace) -> list[Share]:
    """Backends that compile a program for each case for every worker, the others for a few; the slowest first."""
    compiled = {name for (name, _), info in get_manager().backends.items() if info.compiles}
    found = []
    for backend in sorted(given.backends.split(","), key=lambda name: name not in compiled):
        parts = given.workers if backend in compiled else min(PARTS, given.workers)
        found += [Share(backend, index, parts) for index in range(parts)]
    return found


def collect(parts: list[dict[str, Any]]) -> Report:
    """The reports of one backend's processes as one."""
    whole = [Report.from_dict(part) for part in parts if "device" in part]
    report = whole[0] if whole else Report(parts[0]["backend"], "", "none", "", (), (), {}, "", "")
    for other in whole[1:]:
        report.absorb(other)
    for part in parts:
        if "device" not in part:
            report.findings.update(part["findings"])
            died = report.counts.setdefault("died", {"failed": 0})
            died["failed"] += len(part["findings"])
    return report


def table(reports: dict[str, Report]) -> str:
    """One line for each backend."""
    lines = [f"{'backend':<16}" + "".join(f"{verdict:>9}" for verdict in VERDICTS) + "  closest to its bound"]
    for name, report in reports.items():
        check, (margin, _) = max(report.margins.items(), key=lambda item: item[1][0], default=("", (0.0, "")))
        counts = "".join(f"{getattr(report, verdict):>9}" for verdict in VERDICTS)
        lines.append(f"{name:<16}{counts}  {check} {margin:.0%}")
    return "\n".join(lines)


def record_all(result: Path) -> int:
    """Write the evidence of every backend of a result."""
    for report in map(Report.from_dict, json.loads(result.read_text())["backends"].values()):
        print(f"evidence written: {record(report).name}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    if given.record:
        return record_all(given.record)
    if given.share:
        work(given)
        return 0
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.workers) as pool:
        ended = list(pool.map(lambda share: finish(given, share, Path(folder)), shares(given)))
    by_backend: dict[str, list[dict[str, Any]]] = {}
    for part in (part for parts in ended for part in parts):
        by_backend.setdefault(part["backend"], []).append(part)
    reports = {name: collect(parts) for name, parts in by_backend.items()}
    ok = bool(reports) and all(report.ok for report in reports.values())
    seconds = time.perf_counter() - begin
    print(*reports.values(), table(reports), sep="\n\n")
    print(f"{'ok' if ok else 'FAILED'} in {seconds:.0f} s, {given.workers} processes at once")
    if given.out:
        first = next(iter(reports.values()))
        head = {"ok": ok, "seconds": round(seconds, 1), "device": first.device, "date": first.date}
        found = {name: report.to_dict() for name, report in reports.items()}
        result = {**head, "versions": first.versions, "level": given.level, "backends": found}
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
