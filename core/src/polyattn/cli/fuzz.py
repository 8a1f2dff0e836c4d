"""`polyattn fuzz` compares random calls with the reference; a call that fails is written as a script."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ..errors import ConfigError
from .options import Device, Json
from .questions import above_zero
from .rendering import grid, progress, screen, show_json, title

if TYPE_CHECKING:
    from rich.console import Console

    from ..testing.fuzz import Report

__all__ = ["FAILED", "fuzz"]

FAILED = 1


def fuzz(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Try only this backend; may be repeated. Without it: all that are available for the device, and "
            "automatic selection.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="N", help="Seconds after which no further call is drawn.")] = 60.0,
    calls: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Draw N calls, however long they take, and give each of them to every backend: the same seed and N "
            "give the same run on a machine of any speed. Without it: as many as --seconds allows.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The seed of the calls: the same seed draws the same calls in the same order. Without it: a new "
            "one, printed first.",
        ),
    ] = None,
    number: Annotated[int | None, typer.Option(min=0, metavar="N", help="Run only this call of the seed.")] = None,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the scripts of failures.")] = Path(
        "polyattn-fuzz"
    ),
    as_json: Json = False,
) -> None:
    """Draw random calls, fine and wrong ones, and compare what every backend makes of them with the reference.

    A fine call must agree with the reference or be refused with a reason, a wrong one refused with a typed error. Each
    failure is made as small as it gets and written as a script. Exit code 1 when there is one.
    """
    from ..bench.measure.devices import named_device
    from ..testing import fuzz as fuzzing  # these need torch

    above_zero("--seconds", seconds)
    if math.isinf(seconds):
        raise ConfigError(f"--seconds {seconds:g}: give a finite number of seconds")
    if calls is not None and number is not None:
        raise ConfigError(f"--calls {calls} and --number {number}: a number is one call; give one of the two")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder, or a name that is free")
    where = str(named_device(device))
    seed = random.randrange(2**31) if seed is None else seed
    console = screen()
    if not as_json:
        # First of all, so that it is known whatever happens to the process.
        console.print(Text.assemble(("seed ", "quiet"), (str(seed), "figure")))
    with progress(console, quiet=as_json) as bar:
        task = bar.add_task("calls", total=calls)
        report = fuzzing.fuzz(
            backend or None,
            seed=seed,
            seconds=seconds,
            calls=calls,
            device=where,
            out=out,
            number=number,
            tell=lambda so_far: bar.update(task, completed=so_far.drawn),
        )
    if as_json:
        show_json(report.to_dict())
    else:
        _print(console, report)
    if not report.ok:
        raise typer.Exit(FAILED)


def _print(console: Console, report: Report) -> None:
    words = f"{report.drawn} calls in {report.seconds:.0f} s on {report.device}"
    console.print(title("Fuzz", words))
    console.print()
    failed = {found.backend for found in report.failures}
    table = grid("backend", "!compared", "!wrong", "!raised", "!refused", "!bad calls rejected", "!accepted", "!keys")
    for name in report.backends:
        bad = "bad" if name in failed else "quiet"
        table.add_row(
            Text(name, style="name"),
            str(report.compared[name]),
            *(Text(str(count[name]), style=bad) for count in (report.disagreed, report.raised)),
            str(report.refused[name]),
            str(report.rejected[name]),
            Text(str(report.accepted[name]), style=bad),
            f"{report.longest[name]:,}",
        )
    console.print(table)
    for found in report.failures:
        console.print()
        console.print(Text.assemble((f"{found.backend}  ", "bad"), str(found.failure)))
        console.print(Text(f"  number {found.number}, made smaller: {found.drawn.id}", style="quiet"))
        console.print(Text(f"  {found.path}"))
    if report.lost:
        console.print()
        console.print(Text(f"THE DEVICE WAS LOST after {report.lost}", style="bad"))
    if report.ok:
        console.print()
        console.print(Text("No failure.", style="good"))
