"""`polyattn verify` runs conformance and a short benchmark of all that is installed for a device, and writes files to
hand in."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import PolyattnError
from .conform import FAILED
from .options import Device, Json
from .rendering import grid, progress, screen, show_json, title

if TYPE_CHECKING:
    from ..testing.verifying import Verified

__all__ = ["verify"]

SHEET = Path(__file__).parents[1] / "bench" / "short.yaml"


def verify(
    device: Device = "auto",
    backend: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Try only backends whose name matches; may be repeated. Without it: all."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Give a first answer: fewer cases, and no evidence.")] = False,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.001,
            metavar="N",
            help="Seconds that an entry of the benchmark is measured in each of its nine rounds.",
        ),
    ] = 0.02,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder for the files, which is not there yet or is empty. Default: "
            "polyattn-verify-PLATFORM-DATE.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what works on this device: run conformance of every backend that can run here, and a short benchmark.

    A folder is written with a report for people (report.md), the full results, and an evidence file for each backend
    that conforms. A backend that does not gets none, and the exit code is 1; so it is where the benchmark fails.
    """
    from ..bench.cli_options import BenchOptions
    from ..dispatch.binding import device_facts
    from ..testing.verifying import markdown, prepare, verifiable, write

    asked = BenchOptions((str(SHEET),), device=device, seconds=seconds)
    asked.check_limits()
    where = asked.where()
    platform: str = device_facts(where)["platform"]
    ready, absent = verifiable(platform, backend or ())
    folder = out or Path(f"polyattn-verify-{platform}-{datetime.datetime.now(datetime.timezone.utc).date()}")
    prepare(folder)
    console = screen()
    ran = _conformance(console, [f"{name}@{platform}" for name in ready], where, quick=quick, quiet=as_json)
    # Kept at once: a benchmark may lose the device, and conformance takes hours.
    files = write(folder, [*ran, *absent], markdown([*ran, *absent], "The benchmark did not come to its end."))
    lost = ""
    try:
        speed = _benchmark(console, [entry.name for entry in ran if entry.ok], where, seconds, quiet=as_json)
    except (PolyattnError, RuntimeError) as exc:
        lost = f"The benchmark failed: {type(exc).__name__}: {exc}"
        speed = lost
    files = write(folder, [*ran, *absent], markdown([*ran, *absent], speed))
    good = all(entry.ok for entry in ran) and not lost
    if as_json:
        shown = {
            entry.name: {"ok": entry.ok, "evidence": entry.evidence is not None, "why_not": entry.why_not}
            for entry in (*ran, *absent)
        }
        show_json({"ok": good, "backends": shown, "benchmark": lost, "files": [str(path) for path in files]})
    else:
        _show(console, [*ran, *absent], folder, files)
        if lost:
            console.print(Text(lost, style="bad"))
    if not good:
        raise typer.Exit(FAILED)


def _conformance(console: Console, names: list[str], where: Any, *, quick: bool, quiet: bool) -> list[Verified]:
    from ..testing.running import run
    from ..testing.verifying import Verified

    found = []
    with progress(console, quiet=quiet, lines=True) as bar:
        for name in names:
            task = bar.add_task(name, total=None)

            def told(done: int, total: int, case: str, task: Any = task, name: str = name) -> None:
                bar.update(task, completed=done, total=total, description=f"{name} {case}"[:60])

            report = run(name, device=where, level="quick" if quick else "full", progress=told)
            found.append(Verified.of(report))
            bar.remove_task(task)
    return found


def _benchmark(console: Console, names: list[str], where: Any, seconds: float, *, quiet: bool) -> str:
    """Measure the rates of what conforms, as Markdown. On a CPU the rows are tiny, and the times mean nothing."""
    from ..bench import pages, results
    from ..bench.cli_options import BenchOptions
    from ..bench.running import run

    if not names:
        return "Nothing conforms, so nothing was measured."
    cpu = where.type == "cpu"
    asked = BenchOptions((str(SHEET),), candidates=tuple(names), device=str(where), quick=cpu, seconds=seconds)
    plan, sheet = asked.plan()
    result = results.begin(
        sheet, plan.device, plan.peers, ["verify", "--device", str(where)], asked.settings(), quick=plan.quick
    )
    with progress(console, quiet=quiet, lines=True) as bar:
        task = bar.add_task("benchmark", total=len(plan.rows))
        for _ in run(plan, result, lambda _: bar.advance(task)):
            pass
    return pages.markdown(results.summed(result, sheet, plan.rows))


def _show(console: Console, verified: list[Verified], folder: Path, files: list[Path]) -> None:
    console.print(title("What conforms"))
    table = grid("backend", "!verdict", "evidence")
    for entry in verified:
        verdict, style = ("conforms", "good") if entry.ok else ("DOES NOT CONFORM", "bad")
        if entry.report is None:
            verdict, style = "not run", "warn"
        kept = "written" if entry.evidence is not None else entry.why_not
        table.add_row(Text(entry.name, style="name"), Text(verdict, style=style), Text(kept))
    console.print(table)
    console.print(Text(f"{folder}: {', '.join(path.relative_to(folder).as_posix() for path in files)}"))
