"""`polyattn trace` runs a program and records the requests it makes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from .. import tuning
from ..errors import ConfigError
from ..tuning.rows import canonical
from ..user_files import MEGABYTE, read_bytes
from .options import variables_of, with_options
from .rendering import facts, grid, screen, show_json, standing, title

if TYPE_CHECKING:
    from ..bench.measure.traces import Traced

__all__ = ["trace"]

TRACE = Path("trace.jsonl")
STDERR = 2


@with_options("trace")
def trace(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[--] PROGRAM [ARGUMENTS]", help="The program that is run, as a shell would run it."),
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", "-m", metavar="MODULE", help="Run this module, as python -m does.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file of the trace.")] = TRACE,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Run the program twice, without measurements and with them, and say what changed."
        ),
    ] = False,
    *,
    given: Mapping[str, Any],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; what the program prints goes to standard error.")
    ] = False,
) -> None:
    """Run a program and record which requests it makes of polyattn, at which lengths and how often.

    `polyattn tune --from` measures them. The program gets the settings that are given here. The exit code is that of
    the program, which Ctrl-C and SIGTERM are left to. All of its processes are recorded. FILE is replaced when the
    program ends, unless it asked for nothing; a file that is no trace is refused.
    """
    from ..bench.measure.marks import orderly

    words, settings = _words(command or [], module), variables_of(given)
    # With measurements, whatever the variable says: two runs without them compare nothing.
    modes = ("off", "online" if tuning.mode() == "online" else "use") if compare else (None,)
    runs: list[_Run] = []
    with orderly():
        for mode in modes:
            if not runs or not (runs[-1].code or runs[-1].stopped):
                runs.append(_run(words, settings, out, mode, as_json))
    if compare:
        _compare(out, runs[0], runs[1] if len(runs) == 2 else None, as_json)
    else:
        _report(out, runs[-1], as_json)
    if code := runs[-1].shell_code:
        raise typer.Exit(code)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run of the program: its exit code, its seconds from start to end, what it asked for, and whether Ctrl-C or
    SIGTERM told it to end."""

    code: int
    seconds: float
    found: Sequence[Traced]
    stopped: bool = False

    @property
    def shell_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code


def _words(command: list[str], module: str | None) -> list[str]:
    if module is not None:
        return [sys.executable, "-m", module, *command]
    if not command:
        raise ConfigError("nothing to run: polyattn trace -- python program.py, or polyattn trace -m package.module")
    return [sys.executable, *command] if command[0].endswith(".py") else command


def _run(words: list[str], settings: Mapping[str, str], out: Path, mode: str | None, as_json: bool) -> _Run:
    from ..bench.measure.traces import read_trace

    with _beside(out) as part:
        environ = {**os.environ, **settings, "POLYATTN_TRACE": str(part)}
        if mode is not None:
            environ["POLYATTN_TUNING"] = mode
        began = time.perf_counter()
        try:
            program = subprocess.Popen(words, env=environ, stdout=STDERR if as_json else None)
        except OSError as exc:
            raise ConfigError(f"{words[0]} cannot be run: {exc}") from exc
        with program, _left_to(program) as signals:
            code = program.wait()
        seconds = time.perf_counter() - began
        return _Run(code, seconds, read_trace([part]), stopped=bool(signals))


@contextlib.contextmanager
def _left_to(program: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Leave signals to the program alone. Ctrl-C reaches it from the terminal; SIGTERM, which is often sent to this
    process only, is passed on. The list has the signals that came."""
    came: list[int] = []

    def take(number: int, _: object) -> None:
        came.append(number)
        if number == signal.SIGTERM:
            program.terminate()

    main = threading.current_thread() is threading.main_thread()  # no other can take signals
    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM) if main}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """Make an empty file that takes the place of `out` in the end, if anything is in it. It does so also for a run that
    was stopped."""
    if out.exists() and not out.is_file():
        raise ConfigError(f"--out {out} is no file that can be replaced: name one, such as {TRACE}")
    if out.is_file():
        _check_trace(out)
    place = Path(os.path.realpath(out))  # what a link leads to is replaced, not the link; of a ring, the link
    part = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        part.touch()
    except OSError as exc:
        raise ConfigError(
            f"--out {out} cannot be written: {exc.strerror}; name a file in a folder that is there"
        ) from exc
    try:
        yield part
    finally:
        if part.is_file() and part.stat().st_size:
            part.replace(place)
        part.unlink(missing_ok=True)


def _check_trace(out: Path) -> None:
    """Check that the file that would be replaced is a trace, or empty. Its first line decides: the last one of a run
    that ran out of space is torn."""
    from ..bench.measure.traces import read_line

    try:
        if head := read_bytes(out, MEGABYTE, head=MEGABYTE):
            read_line(head.partition(b"\n")[0].decode("utf-8"), str(out))
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"--out {out} is there already and is no trace that can be read: name another file, or remove it"
        ) from exc


def _plain(one: Traced) -> dict[str, Any]:
    return {**one.workload.plain(), "count": one.count, "backend": one.backend}


def _report(out: Path, run: _Run, as_json: bool) -> None:
    if as_json:
        rows = [_plain(one) for one in run.found]
        show_json({"trace": str(out), "exit_code": run.code, "seconds": round(run.seconds, 3), "requests": rows})
        return
    console = screen()
    if not run.found:
        kept = f", and {out} is as it was" if out.exists() else ""
        console.print(Text(f"The program asked polyattn for nothing: nothing was recorded{kept}.", style="warn"))
        return
    console.print(title("Requests", f"{out}; `polyattn tune --from {out}` measures them"))
    table = grid("request", "!calls", "served by")
    for one in run.found:
        table.add_row(one.workload.id, str(one.count), Text(one.backend, style="name"))
    console.print(table)


KERNELS = (
    "kernels that were compiled or loaded for the first time are in it, so run it again; if it stays, "
    "POLYATTN_TUNING=off runs the program as before, and a backend can be named"
)
APART = "the two runs did not make the same requests"
NOTHING = "it asked polyattn for nothing, so this is how much two runs of it differ"
SAME = "no choice is another, so this is how much two runs of the program differ"


def _compare(out: Path, before: _Run, now: _Run | None, as_json: bool) -> None:
    """Compare two runs of one program: who served it, and how long it took. now: None where the first had no second."""
    was, found = ({canonical(one.workload.key()): one for one in (run.found if run else ())} for run in (before, now))
    both = [(one, was[key].backend) for key, one in found.items() if key in was]
    gone = [one for key, one in was.items() if key not in found]
    added = [one for key, one in found.items() if key not in was]
    apart = bool(gone or added)
    changed = sum(one.backend != old for one, old in both)
    slower = ""
    if now and now.seconds > before.seconds:
        cause = KERNELS if changed else APART if apart else SAME if both else NOTHING
        share = now.seconds / before.seconds - 1
        slower = f"slower with measurements, by {now.seconds - before.seconds:.2f} s ({share:.0%}): {cause}"
    if as_json:
        seconds = {
            "without": round(before.seconds, 3),
            "with": round(now.seconds, 3) if now else None,
            "ratio": round(before.seconds / now.seconds, 3) if now else None,
        }
        show_json(
            {
                "trace": str(out),
                "exit_code": (now or before).code,
                "seconds": seconds,
                "slower": slower,
                "requests": [{**_plain(one), "before": old} for one, old in both],
                "only_without": [_plain(one) for one in gone],
                "only_with": [_plain(one) for one in added],
            }
        )
        return
    console = screen()
    if now is None:
        _report(out, before, as_json)
        ended = "was told to end" if before.stopped else f"failed, with exit code {before.shell_code}"
        console.print(Text(f"Nothing is compared: the run without measurements {ended}.", style="warn"))
        return
    if not (was or found):
        _report(out, now, as_json)
        return
    console.print(title("Without measurements, and with them"))
    table = grid("request", "!calls", "without", "with")
    for one, old in both:
        style = "quiet" if one.backend == old else "good"
        table.add_row(one.workload.id, str(one.count), old, Text(one.backend, style=style))
    for one in gone:
        table.add_row(one.workload.id, str(one.count), one.backend, standing("-"))
    for one in added:
        table.add_row(one.workload.id, str(one.count), standing("-"), one.backend)
    console.print(table)
    took = (
        f"{before.seconds:.2f} s without, {now.seconds:.2f} s with: {before.seconds / now.seconds:.2f} x "
        f"(the whole program, its start too)"
    )
    only = [("asked for only without", str(len(gone))), ("asked for only with", str(len(added)))]
    console.print(facts([("changed", str(changed)), *(only if apart else ()), ("took", took)]))
    if slower:
        console.print(Text(f"The program as a whole was {slower}.", style="warn" if changed or apart else "quiet"))
    elif apart:
        console.print(Text(f"{APART[0].upper()}{APART[1:]}, so their times do not compare.", style="warn"))
    elif not changed:
        console.print(Text(f"{SAME[0].upper()}{SAME[1:]}.", style="quiet"))
