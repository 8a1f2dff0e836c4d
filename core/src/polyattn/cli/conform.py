"""`polyattn conform` tries whether a backend is what it says it is, with the kit of `polyattn.testing`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..contract import FAMILIES
from ..contract.vocabulary import DTYPE_WORDS
from ..errors import BackendUnavailableError, ConfigError
from ..registry.manager import get_manager
from ..testing.early_imports import early_imports
from ..testing.where import AUTO, Place, place, unknown_backend
from .options import Json
from .rendering import grid, progress, screen, show_json, title
from .request_flags import one_of

if TYPE_CHECKING:
    from ..testing.catching import Catch
    from ..testing.report import Report

__all__ = ["FAILED", "conform"]

FAILED = 1


def conform(
    backend: Annotated[
        str | None, typer.Argument(help="The backend, as `polyattn list` names it, or NAME@PLATFORM.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Try every pair of values once: under a minute for most backends.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Try up to ten times as many combinations. This is the default.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="A torch device; auto: the backend's accelerator where one is here, else the CPU.")
    ] = AUTO,
    strict_device: Annotated[
        bool,
        typer.Option(
            "--strict-device", help="Take a device that is not here for a failure (code 1), not for `not run` (code 0)."
        ),
    ] = False,
    dtypes: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Try only these dtypes, such as fp32; nothing is recorded then."),
    ] = None,
    families: Annotated[
        str | None, typer.Option(metavar="A,B", help="Try only these families; nothing is recorded then.")
    ] = None,
    write_evidence: Annotated[
        bool,
        typer.Option(
            "--write-evidence", help="Record the run beside the plugin, of --quick too; --full does so by itself."
        ),
    ] = False,
    no_evidence: Annotated[bool, typer.Option("--no-evidence", help="Do not record the run.")] = False,
    planted_bugs: Annotated[
        bool,
        typer.Option(
            "--planted-bugs", help="Try the kit itself, on backends with one known bug each. No backend is named then."
        ),
    ] = False,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh",
            help="Run nothing: evidence follows code that was moved, renamed or commented only; without a backend, "
            "all of it.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Try everything that a backend declares against the reference, and see that it refuses the rest with a reason.

    Exit code 1 when it does not conform. A run of all of it that finds nothing is recorded beside the plugin.
    """
    partial = bool(dtypes or families)
    if refresh:
        _refresh(backend, quick or full or write_evidence or no_evidence or planted_bugs or partial, as_json)
        return
    _agree(backend, quick, full, write_evidence, no_evidence, planted_bugs, partial)
    console = screen()
    if planted_bugs:
        _planted(console, as_json)
        return
    _check_kind(device)
    here = place(backend or "", device)
    if here.missing:
        _not_run(console, here, strict_device, as_json)
        return
    if device != AUTO:
        _check_device(device)
    report = _run(console, here, full=not quick, dtypes=dtypes, families=families, quiet=as_json)
    wanted = not no_evidence and not partial and (write_evidence or not quick)
    path, why_not = _recorded(report) if wanted and report.ok else (None, "")
    if as_json:
        show_json({**report.to_dict(), "evidence": None if path is None else path.name, "evidence_error": why_not})
    else:
        _show(console, report, path, why_not)
    if not report.ok:
        raise typer.Exit(FAILED)


def _agree(
    backend: str | None, quick: bool, full: bool, write: bool, keep_none: bool, planted: bool, partial: bool
) -> None:
    """Check that the words of a command line fit together."""
    if planted and backend is not None:
        raise ConfigError(f"--planted-bugs tries the kit itself, not {backend}: leave one of the two out")
    if not planted and backend is None:
        raise ConfigError("which backend? polyattn conform BACKEND; `polyattn list` shows them")
    for one, other, both in (
        ("--quick", "--full", quick and full),
        ("--write-evidence", "--no-evidence", write and keep_none),
    ):
        if both:
            raise ConfigError(f"{one} and {other} exclude each other: leave one out")
    if write and partial:
        raise ConfigError(
            "--write-evidence with --dtypes or --families: part of a backend is no evidence for it. Leave these out"
        )


def _refresh(backend: str | None, more: bool, as_json: bool) -> None:
    """Let the evidence of a backend, or of all, follow its code."""
    from ..testing.recording import refresh

    if more:
        raise ConfigError("--refresh runs nothing: give it a backend or nothing, and --json")
    infos = get_manager().backends.values()
    chosen = [info for info in infos if backend is None or backend in (info.name, info.id)]
    if not chosen:
        raise BackendUnavailableError(unknown_backend(backend or ""))
    found = {info.id: path for info in chosen if (path := refresh(info.name, info.platform)) is not None}
    if as_json:
        show_json({"refreshed": {name: path.name for name, path in found.items()}})
        return
    console = screen()
    for name, path in found.items():
        console.print(Text(f"{name}: {path.name} says where its code is now"))
    if not found:
        console.print(Text("nothing to refresh: evidence that reads stale is of other code, and is run again"))


def _check_kind(device: str) -> None:
    """Refuse a kind of device that no platform has, which is a slip. `place` knows more of the others, and needs no
    torch."""
    kinds = {platform.device_type for platform in get_manager().platforms.values()}
    if device.partition(":")[0] not in {AUTO, *kinds}:
        _check_device(device)


def _check_device(device: str) -> None:
    from ..bench.measure.devices import named_device

    named_device(device)


def _words(flag: str, text: str | None, known: Iterable[str]) -> list[str] | None:
    words = [one_of(flag, word, known) for word in (text or "").split(",") if word]
    if text is not None and not words:
        raise ConfigError(f"{flag} {text!r} names none; leave it out for all")
    return words or None


def _run(console: Console, here: Place, *, full: bool, dtypes: str | None, families: str | None, quiet: bool) -> Report:
    with progress(console, quiet=quiet, lines=True) as bar:
        task = bar.add_task("starting PyTorch", total=None)
        from ..testing.running import FLOATS, run

        meant = {word: name for word, name in DTYPE_WORDS.items() if name in FLOATS}

        def told(done: int, total: int, case: str) -> None:
            bar.update(task, completed=done, total=total, description=case[:60])

        report = run(
            here.info.id,
            device=here.device,
            level="full" if full else "quick",
            dtypes=_words("--dtypes", dtypes, meant),
            families=_words("--families", families, FAMILIES),
            progress=told,
        )
    report.warnings += early_imports([get_manager().owner(here.info)], get_manager().backends.values())
    return report


def _recorded(report: Report) -> tuple[Path | None, str]:
    """Write the evidence and return (its file, why there is none)."""
    from ..testing.recording import record

    try:
        return record(report), ""
    except OSError as exc:
        return None, f"evidence is not written, its place is not writable: {exc}"
    except ConfigError as exc:
        return None, str(exc)


def _show(console: Console, report: Report, path: Path | None, why_not: str) -> None:
    console.print(title(report.headline, report.software))
    console.print()
    head, *rows = report.table()
    table = grid("", *(f"!{verdict}" for verdict in head[1:]))
    for row in rows:
        table.add_row(Text(row[0], style="name"), *row[1:])
    console.print(table)
    console.print()
    for line in report.remarks():
        # Unbroken: the name of a case is what goes into a file of expected failures.
        style = "bad" if "FAILED" in line or "LOST" in line else "warn" if line.startswith("warning: ") else ""
        console.print(Text(line, style=style), soft_wrap=True)
    console.print(Text(report.verdict, style="good" if report.ok else "bad"))
    if path is not None:
        console.print(Text(f"evidence written: {path}"))
    if why_not:
        console.print(Text(why_not, style="warn"))


def _not_run(console: Console, here: Place, strict: bool, as_json: bool) -> None:
    if as_json:
        from .. import __version__

        counts = dict.fromkeys(("passed", "refused", "xfailed", "failed"), 0)
        versions = {"polyattn": __version__}
        machine = {"backend": here.info.name, "platform": here.info.platform, "device": "", "versions": versions}
        show_json({"ok": False, **counts, **machine, "not_run": [here.missing]})
    else:
        console.print(Text.assemble((f"{here.info.id}: not run", "bad" if strict else "warn"), f": {here.missing}"))
    if strict:
        raise typer.Exit(FAILED)


def _planted(console: Console, as_json: bool) -> None:
    caught: list[Catch] = []
    with progress(console, quiet=as_json, lines=True) as bar:
        task = bar.add_task("starting PyTorch", total=None)
        from ..testing.catching import catches

        for catch in catches(lambda done, total, what: bar.update(task, completed=done, total=total, description=what)):
            caught.append(catch)
    good = all(catch.good for catch in caught)
    if as_json:
        rows: list[dict[str, Any]] = [catch.to_dict() for catch in caught]
        show_json({"ok": good, "bugs": rows})
    else:
        console.print(title("Planted bugs", "right backends but for one bug each, and the first case that noticed"))
        console.print()
        table = grid("!bug", "!family", "caught by", "case")
        for catch in caught:
            by = Text(catch.caught_by, style="good" if catch.good else "bad")
            table.add_row(Text(catch.bug, style="name"), catch.family, by, Text(catch.case, style="quiet"))
        console.print(table)
        console.print()
        missed = [f"{catch.bug} ({catch.family})" for catch in caught if not catch.good]
        text = f"NOT AS IT MUST BE: {', '.join(missed)}" if missed else f"all {len(caught)} as they must be"
        console.print(Text(text, style="bad" if missed else "good"))
    if not good:
        raise typer.Exit(FAILED)
