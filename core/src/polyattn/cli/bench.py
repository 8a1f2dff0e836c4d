"""`polyattn bench` measures how fast every backend is on sheets of problems, beside libraries that are called
directly."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .. import tuning
from ..errors import BackendUnavailableError, ConfigError
from .options import Device, Isolate, Json
from .rendering import grid, progress, screen, show_json, title

if TYPE_CHECKING:
    import torch

    from ..bench.running import Plan
    from ..bench.sheets import Sheet

__all__ = ["bench"]

BAR = 28
"""Columns of a full bar: the ceiling, or the fastest entry where one is above it."""


def bench(
    sheets: Annotated[
        list[Path] | None, typer.Argument(metavar="SHEET...", help="YAML files of rows, or folders of them.")
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB", help="Measure only these rows: families, or FAMILY/NAME; may be repeated. Without it: all."
        ),
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Measure only these backends; may be repeated. A backend's own name asks for it even where it is a "
            "last resort or not chosen by itself. Without it: all that may be chosen.",
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE", help="A folder or a module with libraries that are called directly; may be repeated."
        ),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Measure only these libraries of --peers; may be repeated.")
    ] = None,
    device: Device = "auto",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Make rows as small as they get and time them once, to see whether everything runs. There are no "
            "verdicts. Needed on a CPU.",
        ),
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0.001, metavar="N", help="Seconds that an entry is measured in each of its rounds.")
    ] = 0.03,
    limit: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="N",
            help="Seconds from the start after which no further row is begun; how many those are is said on "
            "standard error.",
        ),
    ] = 3600.0,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Tune each row's request before it is measured, as `polyattn tune` does, unless the store knows it.",
        ),
    ] = False,
    isolate: Isolate = "auto",
    compile_ahead: Annotated[
        int,
        typer.Option(
            "--compile",
            min=0,
            metavar="N",
            help="Compile kernels in N processes before measuring, for at most 0.3 of the limit.",
        ),
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file of the result, written after every row.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the file of --out.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="With --resume: measure the rows of --rows once more, and keep that.")
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The folder for a PNG and an SVG of each sheet; needs matplotlib (the extra plots)."
        ),
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Show a result file. Nothing is measured, and only --plots and --json go with it."
        ),
    ] = None,
    join: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Make one result of parts of one run, which processes measured on devices of one kind; may be "
            "repeated. Nothing is measured, and only the sheets, --out, --plots and --json go with it.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure every candidate for every row, and libraries that are called directly, each checked before it is timed.

    Rates are beside what the device itself did in the same run. What polyattn chooses, with tuning and without, is
    held to the sheets' bars. A run that was stopped goes on with --resume. Several processes, each with --rows, --out
    and a tuning store of its own, measure a sheet on several devices of one kind: --join makes one result of theirs.
    """
    from ..bench import precompile, results
    from ..bench.cli_options import BenchOptions
    from ..bench.joining import joined, read_parts
    from ..bench.running import DeviceLost
    from ..bench.sheets import read

    asked = BenchOptions(
        tuple(map(str, sheets or [])),
        rows=tuple(rows or "*"),
        candidates=tuple(candidates or "*"),
        peers=tuple(peers or ()),
        peer=tuple(peer or "*"),
        device=device,
        quick=quick,
        tune=tune,
        seconds=seconds,
        limit=limit,
        again=again,
        isolate=isolate,
    )
    measuring = {**dict.fromkeys(asked.given(), True), "--compile": compile_ahead, "--resume": resume}
    if show is not None:
        _check_idle("--show", {"SHEET": sheets, "--join": join, "--out": out, **measuring})
        found = results.load(show)
        _make_room(None, plots)
        _finish(found, plots, as_json)
        return
    if join:
        _check_idle("--join", measuring)
    _agree(sheets, out, resume, join, again=again)
    if isolate != "auto" and not tune:
        raise ConfigError("--isolate says whom --tune tries in a process of its own: add --tune")
    if join:
        result = joined(read_parts(join), read(sheets or []))
        _make_room(out, plots)
        if out is not None:
            results.save(result, out)
        _finish(result, plots, as_json)
        return
    end = time.monotonic() + limit
    plan, sheet = asked.plan()
    if tune:
        _check_tuning(plan.device)
    _make_room(out, plots)
    for line in asked.unknown_targets(sheet):
        print(line, file=sys.stderr, flush=True)
    if compile_ahead:
        precompile.compile_all(asked, compile_ahead, lambda said: print(said, file=sys.stderr, flush=True))
    plan = dataclasses.replace(plan, limit=_left(end))
    result = results.begin(sheet, plan.device, plan.peers, asked.words(), asked.settings(), quick=quick)
    if resume and out is not None and out.exists():
        result = results.resumed(result, out)
    try:
        result = _measured(plan, sheet, result, out, quiet=as_json)
    except DeviceLost as exc:
        if out is None:
            raise BackendUnavailableError(f"{exc}. With --out the run goes on without it, in a new process") from exc
        print(f"{exc}; going on without it in a new process", file=sys.stderr, flush=True)
        results.save(result, out)
        more = [*(["--plots", str(plots)] if plots else []), *(["--json"] if as_json else [])]
        asked = dataclasses.replace(asked, limit=_left(end))
        _again([*asked.words(), "--out", str(out), "--resume", *more])
    _finish(result, plots, as_json)


def _left(end: float) -> float:
    """Return the whole seconds until `end`."""
    return float(max(round(end - time.monotonic()), 0))


def _again(words: list[str]) -> None:
    """Replace this process by the command line `words`; its own device is of no use any more."""
    os.execv(sys.executable, [sys.executable, "-m", "polyattn", *words])


def _check_idle(flag: str, words: Mapping[str, object]) -> None:
    """Check that a command line that measures nothing has no words of measuring."""
    if given := [word for word, value in words.items() if value]:
        raise ConfigError(f"{flag} measures nothing, and takes no {', '.join(given)}: leave out one or the other")


def _check_tuning(device: torch.device) -> None:
    """Refuse what `polyattn tune` would, before anything is measured that could not be kept."""
    from ..bench.tuner.offline import tune_all

    list(tune_all((), device))
    tuning.store().require_persistence()


def _make_room(out: Path | None, plots: Path | None) -> None:
    """Make the folders that are written to, and see that they can be, before hours of measuring, not after them."""
    from ..bench.plots import library

    if plots is not None:
        library()
    folders = {f"--out {out}": out.parent if out is not None else None, f"--plots {plots}": plots}
    for words, folder in folders.items():
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as exc:
            raise ConfigError(
                f"{words}: {folder} is no folder that can be written to ({exc.strerror or exc}): name another"
            ) from exc


def _agree(sheets: list[Path] | None, out: Path | None, resume: bool, join: list[Path] | None, *, again: bool) -> None:
    """Check that the words of a command line fit together."""
    if not sheets and join:
        raise ConfigError(
            "--join needs the sheets of the run too, with all their rows: polyattn bench SHEET... --join FILE"
        )
    if not sheets:
        raise ConfigError(
            "which rows? polyattn bench SHEET..., YAML files or folders of them; --show FILE shows a result"
        )
    if resume and out is None:
        raise ConfigError("--resume goes on with a result file: name it with --out")
    if again and not resume:
        raise ConfigError("--again measures rows of a result once more: name it with --out, and add --resume")
    if out is not None and out.exists() and not resume:
        more = "" if join else "--resume goes on with it; or "
        raise ConfigError(f"--out {out} is there already: {more}name another file, or remove it")


def _measured(plan: Plan, sheet: Sheet, result: dict[str, Any], out: Path | None, *, quiet: bool) -> dict[str, Any]:
    from ..bench import results
    from ..bench.measure.marks import orderly
    from ..bench.running import run

    console = screen()
    every = [row for family in sheet.families for row in family.rows]
    with orderly(), progress(console, quiet=quiet, lines=True) as bar:
        task = bar.add_task(
            "rows", total=len(plan.rows), completed=sum(bool(results.kept(result, r)) for r in plan.rows)
        )

        def tell(row: Mapping[str, Any]) -> None:
            bar.advance(task)
            if not quiet:
                console.print(_row(row))

        for so_far in run(plan, result, tell):
            if out is not None:
                results.save(results.summed(so_far, sheet, every), out)
    result = results.summed(result, sheet, every)
    if out is not None:
        results.save(result, out)
    begun = {(row["family"], row["name"]) for row in result["rows"]}
    if left := sum((row.family, row.name) not in begun for row in plan.rows):
        more = "--resume goes on with them" if out is not None else "with --out, --resume could go on with them"
        said = f"{left} of {len(plan.rows)} rows were not begun: the time was up (--limit); {more}"
        print(said, file=sys.stderr, flush=True)
    return result


def _row(row: Mapping[str, Any]) -> Group:
    """Show a row when it is done: a line with a bar for each entry, the fastest first."""
    from ..bench.pages import figure, rejected

    entries: dict[str, Any] = row["entries"]
    head = title(f"{row['family']}/{row['name']}", row["unit"])
    if why := rejected(row):
        head.append(f"  {why}", "bad")
    table = Table.grid(padding=(0, 1))
    for justify in ("left", "left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    timed = sorted((entry["us"], name) for name, entry in entries.items() if "us" in entry)
    most = max([100.0, *(entries[name]["percent"] for _, name in timed)])
    for _, name in timed:
        entry = entries[name]
        marks = [how for how, chosen in row["choice"].items() if chosen == name]
        table.add_row(
            Text(name, style="quiet" if entry.get("peer") else "name"),
            Text("█" * max(round(BAR * entry["percent"] / most), 1), style="good" if marks else "quiet"),
            Text(figure(entry["rate"]), style="figure"),
            f"{entry['percent']:.0f}%",
            Text(", ".join(marks), style="good"),
        )
    wrong = [(name, entry) for name, entry in entries.items() if entry.get("kind") not in (None, "refused")]
    lines = [Text(f"{name} {entry['kind']}: {entry['failed']}", style="bad") for name, entry in wrong]
    if "note" in row:
        lines.append(Text(row["note"], style="bad"))
    return Group("", head, *([table] if timed else []), *lines)


def _finish(result: dict[str, Any], plots: Path | None, as_json: bool) -> None:
    from ..bench import pages

    drawn: list[Path] = []
    if plots is not None:
        from ..bench.plots import draw

        drawn = draw(result, plots)
    if as_json:
        show_json({**result, "plots": [str(path) for path in drawn]})
        return
    console = screen()
    console.print()
    console.print(title("Benchmark", pages.caption(result)))
    if result["quick"]:
        console.print(Text(pages.QUICK, style="warn"))
    for line in filter(None, (pages.device_line(result), pages.parts_line(result))):
        console.print(Text(line))
    console.print()
    table = grid("row", "!polyattn", "!rate", "!share", "fastest")
    for row in result["rows"]:
        table.add_row(*_summary(row))
    console.print(table)
    # A bar on rows of which none was measured has nothing to say here; the result file has it.
    verdicts = [said for said in result["verdicts"] if said["rows"]]
    if verdicts:
        console.print()
        table = grid("bar", "asked", "verdict", "!mean", "!least", "of row")
        for said in verdicts:
            style = {"met": "good", "missed": "bad"}.get(said["verdict"], "warn")
            figures = [f"{said[name]:.2f}" if name in said else "" for name in ("geomean", "least")]
            verdict = Text(pages.verdict_of(said), style=style)
            table.add_row(Text(said["bar"], style="name"), said["asked"], verdict, *figures, said.get("least_row", ""))
        console.print(table)
        for said in verdicts:
            if line := pages.breaking(said):
                console.print(Text.assemble((said["bar"], "name"), f": {line}"))
    for path in drawn:
        console.print(Text(str(path)))


def _summary(row: Mapping[str, Any]) -> list[Text]:
    """Show a row at the end: polyattn's choice, and the fastest of all."""
    from ..bench.bars import OWN
    from ..bench.pages import MARKED, figure, title_of

    name = row["choice"].get("tuned", "")
    name = name if name in row["entries"] else ""
    entry = row["entries"].get(name, {})
    timed = sorted((e["us"], other) for other, e in row["entries"].items() if "us" in e)
    fastest = Text("nothing was timed", style="warn")
    if timed:
        ratio = f" {entry['us'] / timed[0][0]:.2f} x" if "us" in entry and timed[0][1] != name else ""
        fastest = Text(timed[0][1] + ratio, style="good" if timed[0][1] == name else "")
    rate = f"{figure(entry['rate'])} {row['unit']}" if "us" in entry else "-"
    share = f"{entry['percent']:.0f}%" if "us" in entry else ""
    label = Text(f"{row['family']}/{title_of(row).replace(MARKED, '*')}", style="" if row["accepted"] else "warn")
    return [label, Text(name.removeprefix(OWN), style="name"), Text(rate, style="figure"), Text(share), fastest]
