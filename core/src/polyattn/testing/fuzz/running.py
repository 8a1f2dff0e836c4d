"""A run: draw, judge, shrink, write. One seed gives the same calls in the same order; a time or a count decides how
many."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform as machine
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...contract import scalars
from ...errors import ConfigError
from ...selection.inspection import list_backends
from ..calls import Installed
from ..checks import CLEAR
from ..machine import lost
from .drawing import SHORT, Drawn, draw, scores
from .judging import Failure, Verdict, judge
from .scripts import script
from .shrinking import shrink

__all__ = ["AUTOMATIC", "Found", "Report", "fuzz"]

AUTOMATIC = "automatic"
"""How a report calls a call that names no backend."""

SHARE = 1.5
"""Times the average share of the time that one backend may take; one that has passes calls over, so that a backend
that compiles programs leaves the others theirs."""

COUNTED = ("compared", "disagreed", "raised", "refused", "rejected", "accepted", "longest")
"""What a report has of each backend."""

COSTLY, RARE = 500_000, 8
"""Scores of a call that takes a CPU as long as a hundred others; one of how many such is made there."""

INTERPRETED = 5_000
"""Scores that a long call may have where an interpreter runs the kernels."""

KEPT = 5
"""Failures of one backend that are shrunk and written; more of them are counted only."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Describes one failure: the smallest call that shows it, and the script that does."""

    backend: str
    number: int
    drawn: Drawn
    failure: Failure
    path: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "number": self.number,
            "case": self.drawn.case.id,
            "wrong": self.drawn.wrong,
            "check": self.failure.check,
            "message": self.failure.message,
            "script": None if self.path is None else str(self.path),
        }


@dataclasses.dataclass
class Report:
    """Describes what a run did.

    Attributes:
        seed, device, seconds, backends: of the run. drawn: calls that were drawn, wrong ones among them.
        compared: backend -> calls that agreed with the reference or did not; disagreed: those that did not; raised:
            those that ended with an exception that is no refusal; refused: those refused with a reason; rejected:
            wrong calls that were refused with a typed error; accepted: wrong calls that were not.
        longest: backend -> most keys of a call that was compared.
        lost: the call after which the device could not be used any more.
        failures: the first few of each backend; more: backend -> how many others failed.
        spent: backend -> seconds.
    """

    seed: int
    device: str
    backends: tuple[str, ...] = ()
    seconds: float = 0.0
    drawn: int = 0
    compared: Counter[str] = dataclasses.field(default_factory=Counter)
    disagreed: Counter[str] = dataclasses.field(default_factory=Counter)
    raised: Counter[str] = dataclasses.field(default_factory=Counter)
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    rejected: Counter[str] = dataclasses.field(default_factory=Counter)
    accepted: Counter[str] = dataclasses.field(default_factory=Counter)
    longest: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[Found] = dataclasses.field(default_factory=list)
    more: Counter[str] = dataclasses.field(default_factory=Counter)
    spent: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    lost: str = ""

    @property
    def ok(self) -> bool:
        return not self.failures and not self.lost

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "seed": self.seed,
            "device": self.device,
            "seconds": round(self.seconds, 1),
            "drawn": self.drawn,
            **{word: {name: getattr(self, word)[name] for name in self.backends} for word in COUNTED},
            "failures": [found.to_dict() for found in self.failures],
            "more": dict(self.more),
            "lost": self.lost,
            "versions": {"polyattn": __version__, "torch": torch.__version__, "python": machine.python_version()},
        }


def fuzz(
    backends: Sequence[str | None] | None = None,
    *,
    seed: int = 0,
    seconds: float = 60.0,
    calls: int | None = None,
    device: str = "cpu",
    out: Path | None = None,
    number: int | None = None,
    first: bool = False,
    tell: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Draw calls until the time is up, or so many, and give each to every backend.

    With `calls` or `number` nothing depends on how fast the machine is: every backend is given every call, and a
    failure is made smaller for as long as it gets smaller.

    Args:
        backends: their names, None among them for calls that name none; without any, automatic selection and every
            backend that is available for the device.
        seed: of the calls. seconds: how long to go on; the last call, and shrinking, may take some more.
        calls: how many are drawn, at least 1, in place of `seconds`; None = as many as there is time for.
        device: torch device to run on.
        out: folder for the scripts, made when there is something to write; None = none are written.
        number: only the call of this number, and no `calls`.
        first: stop at the first failure.
        tell: called after each call, with the report so far.

    Raises:
        BackendUnavailableError: a backend is unknown, or cannot run here. ConfigError: no such device; `seconds`,
            `calls` or `seed` is no number to work with; or `calls` and `number` are both given.
    """
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"seconds={seconds:g} must be a number above 0; 60 is usual")
    if calls is not None and (not scalars.whole(calls) or calls < 1):
        raise ConfigError(f"calls={scalars.shown(calls)} must be a whole number of at least 1; None ends by the time")
    if calls is not None and number is not None:
        raise ConfigError(f"calls={calls} and number={number}: a number is one call; give one of the two")
    here = Installed("reference", device)
    if backends is None:
        able = [s.name for s in list_backends(here.platform) if s.status == "available"]
        backends = [None, *able]
    slow = {name for name in backends if name is not None and Installed(name, device).interpreted}
    report = Report(seed, str(here.device), tuple(name or AUTOMATIC for name in backends))
    started = time.monotonic()
    one, timed = number is not None, calls is None and number is None
    with _trail(out) as say, _one_thread():
        for count in range(number or 0, (number or 0) + 1 if one else sys.maxsize):
            report.seconds = time.monotonic() - started
            if (timed and report.seconds >= seconds) or report.drawn == calls or (first and not report.ok):
                break
            drawn = draw(seed, count)
            if not one and here.device.type == "cpu" and count % RARE and scores(drawn.case) > COSTLY:
                continue
            report.drawn += 1
            for backend in backends:
                name = backend or AUTOMATIC
                begun = time.monotonic()
                if timed and report.spent[name] * len(backends) > max(SHARE * (begun - started), 2.0):
                    continue
                if name in slow and drawn.case.longest[1] > SHORT and scores(drawn.case) > INTERPRETED:
                    continue
                say(f"seed {seed}, number {count}, backend {name}, {drawn.id}\n")
                failed = _one(report, drawn, count, backend, here.device, out, timed)
                report.spent[name] += time.monotonic() - begun
                if failed and lost(here.device):
                    report.lost = f"number {count} of {name}: {drawn.id}"
                    break
            tell(report)
            if report.lost:
                break
    report.seconds = time.monotonic() - started
    return report


def _one(
    report: Report, drawn: Drawn, number: int, backend: str | None, device: torch.device, out: Path | None, timed: bool
) -> bool:
    """Give one call to one backend; whether it failed."""
    name = backend or AUTOMATIC
    verdict = judge(drawn, backend, device)
    _count(report, name, drawn, verdict)
    if verdict.failure is None:
        return False
    mine = [found for found in report.failures if found.backend == name]
    again = any(_kind(found.drawn, found.failure) == _kind(drawn, verdict.failure) for found in mine if drawn.wrong)
    if again or len(mine) >= KEPT or report.more[name] >= KEPT or lost(device):
        report.more[name] += 1
        return True
    small, failure = _smallest(drawn, verdict.failure, backend, device, timed)
    if any(found.drawn == small for found in mine):
        report.more[name] += 1
        return True
    path = None
    if out is not None:
        origin = f"polyattn fuzz --seed {report.seed} --number {number}" + (f" --backend {backend}" if backend else "")
        path = out / f"{name}-{report.seed}-{number}.py"
        path.write_text(script(small, failure, backend, device, origin), encoding="utf-8")
    report.failures.append(Found(name, number, small, failure, path))
    return True


def _count(report: Report, name: str, drawn: Drawn, verdict: Verdict) -> None:
    failure = verdict.failure
    if verdict.word in ("refused", "rejected"):
        (report.refused if verdict.word == "refused" else report.rejected)[name] += 1
    elif failure is not None and failure.check == "call":
        report.raised[name] += 1
    elif failure is not None and drawn.wrong:
        report.accepted[name] += 1
    elif verdict.word != "passed over":
        report.compared[name] += 1
        report.disagreed[name] += failure is not None
        report.longest[name] = max(report.longest[name], drawn.case.longest[1])


def _smallest(
    drawn: Drawn, failure: Failure, backend: str | None, device: torch.device, timed: bool
) -> tuple[Drawn, Failure]:
    last = {drawn: failure}

    def fails(candidate: Drawn) -> bool:
        found = judge(candidate, backend, device).failure
        if found is None or _kind(candidate, found) != _kind(drawn, failure):
            return False
        last[candidate] = found
        # Small calls have small errors, which are allowed: what is made smaller must stay as wrong as it was.
        return found.excess >= min(CLEAR, failure.excess)

    small = shrink(drawn, fails) if timed else shrink(drawn, fails, math.inf)
    return small, last[small]


def _kind(drawn: Drawn, failure: Failure) -> tuple[str, str, str]:
    """Return what makes two failures alike: how the call is spoilt, which check, and which exception where there was
    one."""
    raised = failure.message.partition(":")[0] if failure.check == "call" else ""
    return drawn.wrong, failure.check.partition(" ")[0], raised


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Within: torch computes in one thread. In calls this small, several spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _trail(folder: Path | None) -> Iterator[Callable[[str], None]]:
    """Within: the file `running` in the folder of scripts says which call is made, for when it ends the process."""
    if folder is None:
        yield lambda text: None
        return
    path = folder / "running"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as exc:
        raise ConfigError(f"--out {folder} cannot be written ({exc}); name another folder") from exc

    def say(text: str) -> None:
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()

    try:
        with path.open("w", encoding="utf-8") as file:
            yield say
    finally:
        path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
