"""Conformance of core's backends on an accelerator: the same cases and gates as everywhere, several processes at once.

    python benchmarks/conform_device.py --device cuda --dtypes bfloat16,float16 --out result.json

It needs torch for the device and polyattn (installed, or `PYTHONPATH=core/src`), nothing else. FlexAttention and our
own kernels (`--backends triton`) compile a program or two for each case, so the cases are dealt to worker processes a
few at a time. A kernel that reads where it must not takes its process down, or the device with it: that case is a
finding, and a new process goes on with the others. The result is written as the run goes; after `--limit` seconds, or
whatever else ended it, the same command with `--resume` runs what is missing or failed. Nothing is left out silently:
what was not run is listed. Exit code 0: all conform; 1: they do not, or something was not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from polyattn.errors import ConfigError, PolyattnError
from polyattn.testing import Case, Finding, Installed, Outcome, Report, plan, record, run
from polyattn.testing.recording import stale
from polyattn.testing.report import VERDICTS
from polyattn.testing.running import versions_of

BACKENDS = ("torch_sdpa", "flex_attention", "torch_native")
RESTARTS = 100
"""Processes that a backend may cost before the rest of its cases is given up (and said to be)."""

DEALT = {True: 16, False: 256}
"""Most cases that a process is dealt at a time, by whether each compiles a program: neighbours in a plan share
programs. Towards the end it is one case, so that no process is waited for: a library may compile as well."""

SAVED = 5.0
"""Seconds between two states of the result in its file."""

ENDING = 3.0
"""Seconds of the limit that are kept for the end of the run."""

# Workers fill the machine; what each compiles, it compiles itself. MAX_JOBS is of ninja, by which FlashInfer builds: it
# would start a job for every core in each of them, and cases run into their --timeout.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "MAX_JOBS": "2"}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="torch device (default: cuda)")
    parser.add_argument("--backends", default=",".join(BACKENDS), help=f"default: {','.join(BACKENDS)}")
    parser.add_argument("--dtypes", default="bfloat16,float16", help="default: bfloat16,float16")
    parser.add_argument("--families", help="families to look at, such as linear (default: all)")
    parser.add_argument("--level", choices=("quick", "full"), default="quick")
    parser.add_argument("--per-row", type=int, help="combinations for each capability row and dtype")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes at once")
    parser.add_argument(
        "--devices", type=int, default=1, help="devices of one kind that the processes share (default: 1)"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one case may take (default: 300)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds that the whole run may take")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    parser.add_argument("--resume", action="store_true", help="run what OUT lacks, and what failed in it")
    parser.add_argument("--record", type=Path, metavar="RESULT", help="write a result as evidence; run nothing")
    given = parser.parse_args(arguments)
    if given.resume and given.out is None:
        parser.error("--resume goes on with the result in --out: name that file too")
    return given


def families(given: argparse.Namespace) -> list[str] | None:
    """Those that are asked for; None = all."""
    return given.families.split(",") if given.families else None


# ------------------------------------------------------------------------------------------------- a worker process


def work(given: argparse.Namespace, backend: str, pipe: Connection, log: Path, index: int) -> None:
    """Run the cases that are dealt on device `index`, and say of each when it begins, and what was found when it has
    ended."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    if index:
        torch.accelerator.set_device_index(index)

    def dealt() -> Iterator[int]:
        while positions := pipe.recv():
            for position in positions:
                pipe.send(("begins", position))
                yield position
            pipe.send(("idle", None))

    run(
        backend,
        device=given.device,
        dtypes=given.dtypes.split(","),
        level=given.level,
        families=families(given),
        per_row=given.per_row,
        only=dealt(),
        keep=lambda report, position: pipe.send(("ended", (position, report))),
    )


def start(given: argparse.Namespace, backend: str, log: Path, index: int) -> tuple[Any, Connection]:
    """A worker process on device `index`, and the pipe to it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(given, backend, theirs, log, index))
    process.start()
    theirs.close()
    return process, ours


# ------------------------------------------------------------------------------------------------- the run


@dataclasses.dataclass
class Job:
    """The cases of a backend: `waiting` are positions in its plan. `parts`: reports, by the process they are of."""

    backend: str
    cases: Sequence[Case]
    compiles: bool
    waiting: deque[int]
    parts: dict[int, Report] = dataclasses.field(default_factory=dict)
    done: set[int] = dataclasses.field(default_factory=set)
    died: int = 0

    @property
    def plan(self) -> str:
        """A hash of the cases."""
        return hashlib.sha256("\n".join(case.id for case in self.cases).encode()).hexdigest()[:16]

    def part(self, number: int) -> Report:
        """The report of a process, or of what no process could report (-1)."""
        today = datetime.date.today().isoformat()
        blank = Report(self.backend, "", "none", "", (), (), {}, today, "", total=len(self.cases))
        return self.parts.setdefault(number, blank)

    def broken(self, position: int, said: str) -> None:
        """A case that took its process along."""
        self.part(-1).add(Outcome(self.cases[position], "failed", (Finding("process", said),)))
        self.done.add(position)

    def give_up(self, why: str) -> None:
        self.part(-1).findings[f"{self.backend}: given up"] = [f"{why}: {len(self.waiting)} cases were not run"]
        self.waiting.clear()

    def report(self) -> Report:
        """What was found so far."""
        parts = [Report.from_dict(part.to_dict()) for _, part in sorted(self.parts.items(), reverse=True)]
        whole, *others = parts or [Report.from_dict(self.part(-1).to_dict())]
        for other in others:
            whole.absorb(other)
        # Where a process lost the device, another one went on.
        whole.lost = ""
        if whole.complete:
            whole.check_narrowing()
        return whole

    def left(self) -> list[str]:
        """Ids of the cases that were not run."""
        return [case.id for position, case in enumerate(self.cases) if position not in self.done]

    def resume(self, found: dict[str, Any]) -> None:
        """Begin where an earlier result ended; what failed in it is run again.

        Raises:
            ConfigError: its cases or its sources were others.
        """
        report = Report.from_dict(found)
        self._check(found.get("plan"), report)
        # What its margins were without the cases that run again, nobody knows: theirs go, and they set new ones.
        again = {*found["left"]}
        for name in [name for name in report.findings if name in report.counts]:
            again |= {case.id for case in self.cases if Report.heading(case) == name}
            del report.counts[name]
        for case in self.cases:
            if case.id in report.findings and Report.heading(case) in report.counts:
                report.counts[Report.heading(case)]["failed"] -= 1
                again.add(case.id)
        report.findings = {}
        report.margins = {name: margin for name, margin in report.margins.items() if margin[1] not in again}
        self.parts[0] = report
        self.waiting = deque(position for position, case in enumerate(self.cases) if case.id in again)
        self.done = {*range(len(self.cases))} - {*self.waiting}

    def _check(self, plan: str | None, report: Report) -> None:
        which = f"the result of {self.backend} cannot be gone on with"
        start_anew = "Run without --resume"
        if plan != self.plan:
            raise ConfigError(f"{which}: it is of other cases (level, dtypes, capability rows or kit). {start_anew}")
        if report.sources and stale(report):
            raise ConfigError(f"{which}: {', '.join(report.sources)} are not what ran on {report.date}. {start_anew}")


class Run:
    """What the threads share, one of which there is for each worker process.

    Attributes:
        ends: when no case may run any more (time.perf_counter).
    """

    def __init__(self, given: argparse.Namespace, jobs: list[Job], folder: Path, began: float, before: float) -> None:
        self.given, self.folder, self.began, self.before = given, folder, began, before
        # What compiles takes longest.
        self.jobs = sorted(jobs, key=lambda job: not job.compiles)
        self.ends = began + given.limit - ENDING
        self.lock = threading.RLock()
        self.numbers = 0
        self.saved = began

    def take(self) -> tuple[Job, list[int]] | None:
        """Cases for a process; None when nothing is left, or no time."""
        with self.lock:
            for job in self.jobs:
                if job.waiting and time.perf_counter() < self.ends:
                    size = max(1, min(DEALT[job.compiles], len(job.waiting) // (2 * self.given.workers)))
                    return job, [job.waiting.popleft() for _ in range(size)]
        return None

    def serve(self) -> None:
        """Deal cases to one process after the other, until nothing is left."""
        worker = None
        while taken := self.take():
            job, positions = taken
            if worker is not None and worker.job is not job:
                worker.dismiss()
                worker = None
            if worker is None:
                with self.lock:
                    self.numbers += 1
                worker = Worker(self, job, self.numbers)
            if not worker.finish(positions):
                worker = None
        if worker is not None:
            worker.dismiss()

    def ended(self, job: Job, number: int, position: int, report: Report) -> None:
        with self.lock:
            job.parts[number] = report
            job.done.add(position)
            if time.perf_counter() > self.saved + SAVED:
                self.save()

    def lost(self, job: Job, positions: list[int], at: int | None, said: str) -> None:
        """A process is gone. `at`: the case that it ran, None: it ran none; `said`: why, empty: by request."""
        with self.lock:
            if said and at is not None:
                job.broken(at, said)
            job.waiting.extendleft(position for position in reversed(positions) if position not in job.done)
            job.died += 1
            if said and job.died >= self.given.workers and not any(number > 0 for number in job.parts):
                job.give_up(f"no process started: {said}")
            elif job.died > RESTARTS:
                job.give_up(f"{job.died} processes died")

    def result(self) -> dict[str, Any]:
        with self.lock:
            reports = {job.backend: job.report() for job in self.jobs}
            found = {job.backend: {"plan": job.plan, "left": job.left()} for job in self.jobs}
        first = next(iter(reports.values()))
        ok = all(report.ok for report in reports.values())
        seconds = self.before + time.perf_counter() - self.began
        head = {"ok": ok, "seconds": round(seconds, 1), "device": first.device, "date": first.date}
        backends = {name: {**report.to_dict(), **found[name]} for name, report in reports.items()}
        return {**head, "versions": first.versions, "level": self.given.level, "backends": backends}

    def save(self) -> None:
        """Write the result so far. Whoever reads it, or ends this process, finds a whole file."""
        self.saved = time.perf_counter()
        if self.given.out:
            new = self.given.out.with_suffix(".new")
            new.write_text(json.dumps(self.result(), indent=1) + "\n")
            new.replace(self.given.out)


class Worker:
    """A worker process as its thread sees it."""

    def __init__(self, run: Run, job: Job, number: int) -> None:
        self.run, self.job, self.number = run, job, number
        self.log = run.folder / f"{number}.log"
        self.log.touch()
        self.process, self.pipe = start(run.given, job.backend, self.log, number % run.given.devices)

    def finish(self, positions: list[int]) -> bool:
        """Whether the process lives on, having run these cases. If not, somebody else runs what is left of them."""
        at = None
        try:
            self.pipe.send(positions)
            while True:
                patience = min(self.run.given.timeout, self.run.ends - time.perf_counter())
                if not self.pipe.poll(max(patience, 0)):
                    late = time.perf_counter() >= self.run.ends
                    said = "" if late else f"it took more than {self.run.given.timeout:.0f} s"
                    return self._gone(positions, at, said)
                word, what = self.pipe.recv()
                if word == "idle":
                    return True
                if word == "begins":
                    at = what
                    continue
                position, report = what
                at = None
                self.run.ended(self.job, self.number, position, report)
                if report.lost:
                    return self._gone(positions, None, "")
        except (EOFError, OSError):
            # The pipe is closed: the process is dead, or about to be.
            self.process.join(ENDING)
            said = (self.log.read_text(errors="replace").strip().splitlines() or [""])[-1]
            return self._gone(positions, at, f"the process died with exit code {self.process.exitcode}: {said}")

    def _gone(self, positions: list[int], at: int | None, said: str) -> bool:
        self.process.kill()
        self.run.lost(self.job, positions, at, said)
        return False

    def dismiss(self) -> None:
        """Nothing is left to do."""
        try:
            self.pipe.send([])
            self.process.join(ENDING)
        except OSError:
            pass  # It is gone already, and has told all it ran.
        self.process.kill()


def jobs(given: argparse.Namespace) -> list[Job]:
    """What is to be run of each backend."""
    before = json.loads(given.out.read_text())["backends"] if given.resume and given.out.exists() else {}
    found = []
    for backend in given.backends.split(","):
        target = Installed(backend, given.device)
        asked = {"dtypes": given.dtypes.split(","), "families": families(given)}
        cases = plan(target, **asked, level=given.level, per_row=given.per_row)
        job = Job(backend, cases, target.info.compiles, deque(range(len(cases))))
        if backend in before:
            _same_machine(before[backend], target)
            job.resume(before[backend])
        found.append(job)
    return found


def _same_machine(found: dict[str, Any], target: Installed) -> None:
    """Raises ConfigError where a result is of another architecture or software: evidence is of one of each. The devices
    may differ, whose names a report then has."""
    here = {"arch": target.facts.get("arch", ""), "versions": versions_of(target)}
    then = {name: found.get(name) for name in here}
    if found["device"] != "none" and here != then:
        raise ConfigError(
            f"the result of {found['backend']} cannot be gone on with: it is of {then}, and here is {here}. "
            "Run without --resume"
        )


def table(reports: dict[str, Report]) -> str:
    """One line for each backend."""
    lines = [f"{'backend':<16}" + "".join(f"{verdict:>9}" for verdict in VERDICTS) + "  closest to its bound"]
    for name, report in reports.items():
        check, (margin, _) = max(report.margins.items(), key=lambda item: item[1][0], default=("", (0.0, "")))
        counts = "".join(f"{getattr(report, verdict):>9}" for verdict in VERDICTS)
        lines.append(f"{name:<16}{counts}  {check} {margin:.0%}")
    return "\n".join(lines)


def failures(reports: dict[str, Report]) -> list[str]:
    """A line for each finding of each backend, none left out: what was wrong is known without the result's file."""
    found = [(name, case, said) for name, report in reports.items() for case, said in report.findings.items()]
    return [f"FAILED {name} {case}: {' | '.join(said)}" for name, case, said in found]


def record_all(result: Path) -> int:
    """Write the evidence of every backend of a result."""
    for report in map(Report.from_dict, json.loads(result.read_text())["backends"].values()):
        print(f"evidence written: {record(report).name}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    began = time.perf_counter()
    given = parse(arguments)
    if given.record:
        return record_all(given.record)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    before = json.loads(given.out.read_text())["seconds"] if given.resume and given.out.exists() else 0.0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.workers) as pool:
        run = Run(given, jobs(given), Path(folder), began, before)
        # A thread that raises ends the run: its exception is raised here.
        for thread in [pool.submit(run.serve) for _ in range(given.workers)]:
            thread.result()
    run.save()
    reports = {name: Report.from_dict(found) for name, found in run.result()["backends"].items()}
    ok = all(report.ok for report in reports.values())
    left = sum(len(job.left()) for job in run.jobs)
    print(*reports.values(), table(reports), sep="\n\n")
    found = any(report.findings for report in reports.values())
    said = "ok" if ok else "NOT COMPLETE" if left and not found else "FAILED"
    more = f", {left} cases were not run: --resume runs them" if left else ""
    print(f"{said} in {time.perf_counter() - began:.0f} s, {given.workers} processes at once{more}")
    print(*failures(reports), sep="\n", end="\n" if found else "")
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PolyattnError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")
