"""`polyattn trace`: run a program and record the requests it makes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from .. import tuning
from ..errors import ConfigError
from ..tuning.rows import canonical
from .rendering import facts, grid, screen, show_json, title

if TYPE_CHECKING:
    from ..measuring.traces import Traced

__all__ = ["trace"]

TRACE = Path("trace.jsonl")
STDERR = 2


def trace(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[--] PROGRAM [ARGUMENTS]", help="What is run, as a shell would.")
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", "-m", metavar="MODULE", help="Run a module, as python -m does.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the trace goes.")] = TRACE,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run it twice, without measurements and with them, and say what changed.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON; what the program prints goes to standard error.")
    ] = False,
) -> None:
    """Run a program and record which requests it makes of polyattn, at which lengths and how often.

    `polyattn tune --from` measures them. The exit code is that of the program. All of its processes are recorded. FILE
    is replaced when the program ends, unless it asked for nothing.
    """
    from ..measuring.marks import orderly

    words = _words(command or [], module)
    # With measurements, whatever the variable says: two runs without them compare nothing.
    modes = ("off", "online" if tuning.mode() == "online" else "use") if compare else (None,)
    runs: list[_Run] = []
    with orderly():
        for mode in modes:
            if not runs or not runs[-1].code:
                runs.append(_run(words, out, mode, as_json))
    if compare and len(runs) == 2:
        _compare(out, runs[0], runs[1], as_json)
    else:
        _report(out, runs[-1], as_json)
    if code := runs[-1].code:
        raise typer.Exit(code if code > 0 else 128 - code)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run of the program: its exit code, how long it took from start to end, and what it asked for."""

    code: int
    seconds: float
    found: Sequence[Traced]


def _words(command: list[str], module: str | None) -> list[str]:
    if module is not None:
        return [sys.executable, "-m", module, *command]
    if not command:
        raise ConfigError("nothing to run: polyattn trace -- python program.py, or polyattn trace -m package.module")
    return [sys.executable, *command] if command[0].endswith(".py") else command


def _run(words: list[str], out: Path, mode: str | None, as_json: bool) -> _Run:
    from ..measuring.traces import read_trace

    with _beside(out) as part:
        environ = {**os.environ, "POLYATTN_TRACE": str(part)}
        if mode is not None:
            environ["POLYATTN_TUNING"] = mode
        began = time.perf_counter()
        try:
            code = subprocess.run(words, env=environ, check=False, stdout=STDERR if as_json else None).returncode
        except OSError as exc:
            raise ConfigError(f"{words[0]} cannot be run: {exc}") from exc
        seconds = time.perf_counter() - began
        return _Run(code, seconds, read_trace([part]))


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """An empty file that takes the place of `out` in the end, if anything is in it: also of a run that was stopped."""
    if out.exists() and not out.is_file():
        raise ConfigError(f"--out {out} is no file that can be replaced: name one, such as {TRACE}")
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


SAME = "no choice is another, so this is how much two runs of the program differ"


def _compare(out: Path, before: _Run, now: _Run, as_json: bool) -> None:
    """Two runs of one program: who served it, and how long it took."""
    was = {canonical(one.workload.key()): one.backend for one in before.found}
    both = [(one, old) for one in now.found if (old := was.get(canonical(one.workload.key())))]
    ratio = before.seconds / now.seconds
    changed = sum(one.backend != old for one, old in both)
    slower = ""
    if ratio < 1:
        slower = f"slower with measurements, by {now.seconds - before.seconds:.2f} s ({1 / ratio - 1:.0%}): " + (
            "kernels that were compiled or loaded for the first time are in it, so run it again; if it stays, "
            "POLYATTN_TUNING=off runs the program as before, and a backend can be named"
            if changed
            else SAME
        )
    if as_json:
        rows = [{**_plain(one), "before": old} for one, old in both]
        seconds = {"without": round(before.seconds, 3), "with": round(now.seconds, 3), "ratio": round(ratio, 3)}
        show_json({"trace": str(out), "exit_code": now.code, "seconds": seconds, "slower": slower, "requests": rows})
        return
    console = screen()
    console.print(title("Without measurements, and with them"))
    table = grid("request", "!calls", "without", "with")
    for one, old in both:
        style = "quiet" if one.backend == old else "good"
        table.add_row(one.workload.id, str(one.count), old, Text(one.backend, style=style))
    console.print(table)
    took = f"{before.seconds:.2f} s without, {now.seconds:.2f} s with: {ratio:.2f} x (the whole program, its start too)"
    console.print(facts([("changed", str(changed)), ("took", took)]))
    if slower:
        console.print(Text(f"The program as a whole was {slower}.", style="warn" if changed else "quiet"))
    elif not changed:
        console.print(Text(f"{SAME[0].upper()}{SAME[1:]}.", style="quiet"))
