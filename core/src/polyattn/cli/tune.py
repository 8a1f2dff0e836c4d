"""`polyattn tune` measures which backend is fastest here, keeps it, and manages what is kept."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from .. import tuning
from ..errors import BackendUnavailableError, ConfigError, did_you_mean
from ..registry.manager import get_manager
from ..tuning import TuningStore
from ..tuning.known import shipped_rates
from ..tuning.predicted import rates_of
from ..tuning.store import FORMAT
from ..user_files import MEGABYTE, read_bytes, read_text
from .options import Device, Isolate, Json
from .questions import above_zero
from .rendering import facts, grid, panel, progress, screen, show_json, title

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.tuner.offline import Tried

__all__ = ["tune"]

WHAT, HOW, KEPT = "What is measured", "How", "What is kept"
ALL = "all"
PAGE = 100
"""Measurements of a page."""


def tune(
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", metavar="FILE", help="A trace of `polyattn trace`; may be repeated.", rich_help_panel=WHAT
        ),
    ] = None,
    request: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORDS",
            help="Words like the flags of explain, with batch, q and k: 'dtype=bf16 heads=32 causal batch=4 k=4096'. "
            "May be repeated.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    device: Device = "auto",
    seconds: Annotated[
        float,
        typer.Option(
            metavar="N",
            help="Seconds after which no other request is begun; the next run goes on from there.",
            rich_help_panel=HOW,
        ),
    ] = 600.0,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="How often each backend is timed.", rich_help_panel=HOW)
    ] = 9,
    again: Annotated[
        bool, typer.Option("--again", help="Measure requests again that were measured before.", rich_help_panel=HOW)
    ] = False,
    isolate: Isolate = "auto",
    probe_seconds: Annotated[
        float,
        typer.Option(
            metavar="N",
            help="Seconds after which a process that tries a backend is ended; below 60 the backend is not said to "
            "hang.",
            rich_help_panel=HOW,
        ),
    ] = 180.0,
    show: Annotated[
        bool,
        typer.Option("--show", help=f"Show the measurements that are kept, {PAGE} at a time.", rich_help_panel=KEPT),
    ] = False,
    page: Annotated[
        int, typer.Option(min=1, metavar="N", help="Which of these pages --show shows.", rich_help_panel=KEPT)
    ] = 1,
    release: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Let a quarantined backend (all its libraries, or NAME/KIND), or `all`, be chosen again. What was "
            "measured without it is forgotten, and measured again.",
            rich_help_panel=KEPT,
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the measurements that are kept as JSON.", rich_help_panel=KEPT),
    ] = None,
    import_: Annotated[
        list[Path] | None,
        typer.Option(
            "--import", metavar="FILE", help="Keep what --export wrote; may be repeated.", rich_help_panel=KEPT
        ),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="STORE",
            help="Keep the measurements of another store, not whom it quarantines; may be repeated.",
            rich_help_panel=KEPT,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure which backend serves requests fastest on this machine; calls use it from then on.

    Every backend that takes a request is checked against the reference before it is timed. What is known already is not
    measured again, so a run that was stopped goes on where it was.
    """
    tuning.mode()  # what calls would refuse is refused here too
    keep = {"--export": export, "--import": import_, "--merge": merge, "--release": release}
    kept = [flag for flag, value in keep.items() if value is not None]
    shown = ["--show"] if show else []
    measured = [flag for flag, value in {"--from": trace, "--request": request}.items() if value]
    if len(asked := [flags[0] for flags in (measured, shown, kept) if flags]) > 1:
        raise ConfigError(f"{' and '.join(asked)} exclude one another; run them one after another")
    if kept:
        _keep(export, import_ or [], merge or [], release, as_json)
    elif show:
        _show(page, as_json)
    elif measured:
        _tune(trace or [], request or [], device, seconds, rounds, again, isolate, probe_seconds, as_json)
    else:
        raise ConfigError("nothing to tune: give --from TRACE (see `polyattn trace`), --request WORDS, or --show")


# ------------------------------------------------------------------------------------------------------------ measuring


def _tune(
    traces: list[Path],
    requests: list[str],
    device: str,
    seconds: float,
    rounds: int,
    again: bool,
    isolate: str,
    probe_seconds: float,
    as_json: bool,
) -> None:
    from ..bench.measure.devices import named_device
    from ..bench.measure.marks import orderly
    from ..bench.measure.traces import read_trace
    from ..bench.tuner.offline import isolation_of, tune_all
    from ..dispatch.device_facts import device_facts
    from .request_words import workload_of

    above_zero("--seconds", seconds)
    isolation = isolation_of(isolate)
    where = named_device(device)
    workloads = [one.workload for one in read_trace(traces)]
    if traces and not workloads:
        named = ", ".join(map(str, traces))
        raise ConfigError(
            f"--from {named}: no request is in it; `polyattn trace` writes those of a program that has some"
        )
    workloads += [workload_of(text, device_facts(where)) for text in requests]
    tuning.store().require_persistence()  # before anything is measured that could not be kept
    console, tried = screen(), []
    with orderly(), progress(console, quiet=as_json, lines=True) as bar:
        task = bar.add_task("requests", total=len(workloads))
        for one in tune_all(
            workloads, where, seconds=seconds, rounds=rounds, again=again, isolation=isolation,
            probe_seconds=probe_seconds,
        ):  # fmt: skip
            tried.append(one)
            bar.advance(task)
            if not as_json:
                _say(console, one)
    if as_json:
        show_json(
            {"device": str(where), "store": str(tuning.store().path), "workloads": [_plain(one) for one in tried]}
        )
    else:
        _summary(console, tried)


def _plain(one: Tried) -> dict[str, Any]:
    return {
        **one.workload.plain(),
        "outcome": one.outcome,
        "best": one.best,
        "rule": one.rule,
        "gain": round(one.gain, 3),
        "times": dict(one.times),
        "host": dict(one.host),
        "trouble": dict(one.trouble),
        "quarantined": list(one.quarantined),
        "reason": one.reason,
    }


def _say(console: Console, one: Tried) -> None:
    console.print(Text(one.workload.id, style="name"))
    if one.times:
        gain = ", as before" if one.best == one.rule else f", beside {one.rule}, the choice without measuring"
        if one.best != one.rule and one.rule in one.times:
            gain = f", {one.gain:.2f} x {one.rule}, the choice without measuring"
        beside = "; ".join(f"{name} {_took(one.times, one.host, name)}" for name in one.times)
        console.print(Text.assemble(f"  {one.outcome}: ", (one.best, "good"), f"{gain} ({beside})"))
    else:
        console.print(Text(f"  {one.outcome}: {one.reason}", style="quiet"))
    for name, reason in one.trouble.items():
        held = " [quarantined]" if name in one.quarantined else ""
        console.print(Text(f"  not {name}: {reason}{held}", style="warn"))


def _took(times: Mapping[str, float], host: Mapping[str, float], name: str) -> str:
    """Show the time of the device, and the time of the host where that is longer."""
    time, issued = times[name], host.get(name, 0.0)
    return f"{time:.4g} us, {issued:.4g} us of the host" if issued > tuning.SAME * time else f"{time:.4g} us"


def _summary(console: Console, tried: list[Tried]) -> None:
    counts = collections.Counter(one.outcome for one in tried)
    changed = sum(bool(one.times) and one.best != one.rule for one in tried)
    console.print()
    console.print(
        facts(
            [
                ("requests", ", ".join(f"{count} {outcome}" for outcome, count in counts.items())),
                ("choices changed", str(changed)),
                ("kept in", str(tuning.store().path)),
            ]
        )
    )


# ------------------------------------------------------------------------------------------------------- what is kept


def _is_store(path: Path) -> bool:
    """Tell whether a file is there that is a database, as stores are."""
    try:
        return read_bytes(path, 16, head=16) == b"SQLite format 3\0"
    except OSError:
        return False


def _keep(export: Path | None, imports: list[Path], merges: list[Path], release: str | None, as_json: bool) -> None:
    store, said, given = tuning.store(), {}, {}
    known = {name for name, _ in get_manager().backends}
    if release is not None:
        _check_release(release, known | {held.backend for held in store.quarantined()})
    if imports or merges or release is not None:
        store.require_persistence()
    if export is not None and _is_store(export):
        raise ConfigError(f"--export {export} would replace a tuning store; name another file")
    for path in imports:
        if _is_store(path):
            raise ConfigError(f"--import {path}: this is a tuning store, which goes to --merge")
        try:
            data = json.loads(read_text(path, 64 * MEGABYTE))
        except FileNotFoundError as exc:
            raise ConfigError(f"--import {path}: there is no such file") from exc
        except (OSError, ValueError, RecursionError) as exc:
            raise ConfigError(f"--import {path} cannot be read as JSON: {exc}") from exc
        what = f"imported from {path}"
        said[what], given[what] = store.import_rows(data, known, str(path)), len(data["measurements"])
    for path in merges:
        if not path.is_file():
            raise ConfigError(f"there is no store {path}; --merge takes another machine's or process's tuning store")
        if not _is_store(path):
            raise ConfigError(f"--merge {path}: this is no tuning store; what --export wrote goes to --import")
        data, what = TuningStore(path, by="--merge").export(), f"merged from {path}"
        said[what], given[what] = store.import_rows(data, known, str(path)), len(data["measurements"])
    if release is not None:
        said[f"released {release}"] = tuning.release(None if release == ALL else release)
    if export is not None:
        data = store.export()
        if rates := _rates(export, {one["device"] for one in data["measurements"]}):
            data = {"format": data["format"], "rates": rates, "measurements": data["measurements"]}
        try:
            export.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"--export {export} cannot be written: {exc}") from exc
        said[f"exported to {export}"] = len(data["measurements"])
    tuning.reload()
    if as_json:
        show_json(said)
    else:
        for what, count in said.items():
            # Of two measurements of one thing the later is kept.
            of = f" of {given[what]}" if what in given else ""
            screen().print(f"{what}: {count}{of}", soft_wrap=True, highlight=False, markup=False)


def _rates(export: Path, devices: Collection[str]) -> dict[str, dict[str, float]]:
    """The rates of devices that belong into an exported table: those that the file has, which nobody can measure, and
    what plugins ship of the devices in it."""
    try:
        before = json.loads(read_text(export, 64 * MEGABYTE))
    except (OSError, ValueError, RecursionError):
        before = None  # there is none, or it is replaced
    given = before.get("rates", {}) if isinstance(before, dict) else {}
    shipped = {name: rates for name, rates in shipped_rates().items() if name in devices}
    return {name: one._asdict() for name, one in {**shipped, **rates_of(given, f"--export {export}")}.items()}


def _check_release(name: str, known: Collection[str]) -> None:
    if name not in (ALL, *known):
        raise BackendUnavailableError(
            f"--release: no backend is named {name!r}.{did_you_mean(name, known)} `polyattn tune --show` shows who is "
            f"quarantined; {ALL} releases all"
        )


def _show(page: int, as_json: bool) -> None:
    store = tuning.store()
    counts, held = store.count(), store.quarantined()
    pages = max(-(-sum(counts.values()) // PAGE), 1)
    if page > pages:
        raise ConfigError(f"--page {page}: {pages} is the last page of the measurements in {store.path}")
    rows = store.page((page - 1) * PAGE, PAGE)
    if as_json:
        quarantined = [
            {"backend": one.backend, "place": str(one.place), "request": dict(one.key), "reason": one.reason,
             "date": one.date}
            for one in held
        ]  # fmt: skip
        shown = {"format": FORMAT, "measurements": [row.plain() for row in rows]}
        show_json({"store": str(store.path), **shown, "page": page, "pages": pages, "quarantined": quarantined})
        return
    console = screen()
    console.print(title("Measurements", str(store.path)))
    table = grid("request", "!chosen", "others", "!date", "place")
    for row in (row for row in rows if row.subject == tuning.BACKEND):
        times, host = row.value["times"], row.value.get("host", {})
        out = {one.backend for one in held if (one.place, dict(one.key)) == (row.place, row.key["request"])}
        measured = tuning.measured_of(row)
        left = dataclasses.replace(measured, times=measured.without(out))
        best = next(iter(left.costs(recorded=bool(row.key["request"].get("graph_capture")))), "")
        others = ", ".join(f"{name} {_took(times, host, name)}" for name in times if name != best)
        table.add_row(
            _shown(row.key),
            Text(f"{best} {_took(times, host, best)}", style="good") if best else Text("nobody", style="warn"),
            others,
            row.date[:10],
            str(row.place),
        )
    if table.row_count:
        console.print(table)
    backends = counts.get(tuning.BACKEND, 0)
    console.print(facts([("of backends", f"{backends:,}"), ("of kernels", f"{sum(counts.values()) - backends:,}")]))
    if page < pages:
        more = f"page {page} of {pages:,}: polyattn tune --show --page {page + 1} shows the next, --export writes all"
        console.print(Text(more, style="quiet"))
    for one in held if page == 1 else ():
        where = Text(f"{_shown({'request': one.key})}; {one.place}", style="quiet")
        console.print(panel(f"{one.backend} is quarantined", Text(one.reason, style="warn"), where, style="yellow"))


def _shown(key: Any) -> str:
    request = {"family": "dense", "dtype": "bfloat16", **key.get("request", {})}
    # Of a row that somebody made, they may be anything: it is like no request, and shown.
    words = [str(request.pop("family")), str(request.pop("dtype"))]
    words += [name if value is True else f"{name}={value}" for name, value in request.items()]
    words += [f"{name} {key[name]}" for name in ("batch", "q", "k") if name in key]
    return ", ".join(words)
