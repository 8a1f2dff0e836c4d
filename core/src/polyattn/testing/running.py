"""Conformance of one backend on one device: every declared capability is tried, everything else must be refused."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from ..contract import FAMILIES as ALL_FAMILIES
from ..contract import AttentionRequest, Row
from ..contract.vocabulary import DTYPE_WORDS
from ..errors import BackendUnavailableError, ConfigError, PluginError, did_you_mean
from ..registry.distributions import distribution_version
from ..registry.evidence import row_hash, source_hash
from ..registry.manager import get_manager
from ..selection.aliases import resolve
from ..selection.inspection import catalogue
from .advice import advice
from .beyond import refusals
from .calls import Installed
from .cases import Case
from .checks import Outcome, run_case
from .checks.judged import witness_cases
from .families import DTYPES, FAMILIES
from .generation import LEVELS, ONE, TILES, Level, generate, left_out
from .machine import device_name, lost, records_graphs, versions
from .negative import controls
from .placed_cases import placed_cases
from .report import Report
from .row_cases import holds_here
from .sources import sources_of
from .threads import one_thread
from .tolerances import Finding
from .values import inside
from .where import AUTO, place
from .xfails import Expected, expected_of, no_unmatched, read_xfails

__all__ = ["COMPILED", "FLOATS", "Kept", "Progress", "plan", "run", "versions_of"]

Progress = Callable[[int, int, str], None]
"""Called with (cases done, cases in all, the next case's id)."""

Kept = Callable[[Report, int], None]
"""Called with (the report so far, the position in `plan` of the case that was run last)."""

FLOATS = ("float64", "float32", "bfloat16", "float16")

COMPILED: Mapping[Level, int] = {"quick": 10, "full": 80}
"""Cases of combined fields for each row of a backend that compiles a program for each, in place of `LEVELS`."""


COMPILED_TILES = 24
"""Cases of several tiles for each row and dtype of such a backend, in place of `TILES`."""


def plan(
    target: Installed,
    *,
    dtypes: Sequence[str] | None = None,
    level: Level = "quick",
    families: Sequence[str] | None = None,
    per_row: int | None = None,
) -> list[Case]:
    """The cases of a run, in an order that never changes; those of `quick` are among those of `full`. Arguments as
    `run`.

    Raises:
        ConfigError: a level, dtype or family that does not exist.
    """
    _known("level", (level,), tuple(LEVELS))
    _known("family", families or (), ALL_FAMILIES)
    count = per_row or (COMPILED if target.info.compiles else LEVELS)[level]
    dtypes = _dtypes(dtypes) or FLOATS
    chosen = tuple(families or ALL_FAMILIES)
    computed = [family for family in chosen if family in FAMILIES]
    tiles = _tiles(target, level, count)
    served = generate(target.rows, target.facts, families=computed, dtypes=dtypes, per_row=count, tiles=tiles)
    if "dense" in computed:
        served += placed_cases(target.name, target.rows, target.facts, dtypes)
    if target.accuracy is not None:
        served = [case for case in served if not case.far]
    recorded = records_graphs(target.device)
    served = [case for case in served if not case.request.large and (recorded or case.check != "capture")]
    witnesses = [c for c in witness_cases(target) if c.request.family in chosen and c.request.dtype in dtypes]
    own = [family for family in chosen if _means(target, family)]
    return [*served, *witnesses, *refusals(target.rows, target.facts, families=own, dtypes=dtypes)]


def _tiles(target: Installed, level: Level, count: int) -> int:
    """Cases of several tiles for each row and dtype."""
    slow = target.interpreted or (target.info.compiles and level == "quick" and target.device.type == "cpu")
    if slow or count < COMPILED["quick"]:
        return ONE
    return min(COMPILED_TILES if target.info.compiles else TILES[level], TILES[level])


def _means(target: Installed, family: str) -> bool:
    """Return whether its name means this backend in a family; where it is an alias of another one, that one answers."""
    request = AttentionRequest(**{**target.facts, "family": family})
    offer, *_ = resolve(target.name, request, catalogue())
    return offer is not None and offer.info is target.info


def _dtypes(words: Sequence[str] | None) -> tuple[str, ...]:
    """The dtypes of requests that are meant: people write fp32, as for every command."""
    short = {word: name for word, name in DTYPE_WORDS.items() if name in FLOATS}
    meant = tuple(short.get(word, word) for word in words or ())
    _known("dtype", meant, FLOATS, near=short)
    return meant


def _known(what: str, given: Sequence[str], allowed: Sequence[str], near: Iterable[str] = ()) -> None:
    for word in given:
        if word not in allowed:
            hint = did_you_mean(word, near or allowed)
            raise ConfigError(f"{what} {word!r} is not one of {', '.join(allowed)}.{hint}")


def run(
    backend: str,
    *,
    device: str | torch.device = AUTO,
    dtypes: Sequence[str] | None = None,
    level: Level = "quick",
    families: Sequence[str] | None = None,
    progress: Progress | None = None,
    per_row: int | None = None,
    only: Iterable[int] | None = None,
    keep: Kept | None = None,
) -> Report:
    """Run the conformance of a backend.

    Args:
        backend: its name, or name@platform. device: where; `auto` = its accelerator if that is here, else the CPU.
        dtypes, families: those to look at, None = all. Dtypes have short names too: fp32, bf16.
        level: `quick` (under a minute for most backends) or `full`.
        progress: told before each case.
        per_row: cases of combined fields for each capability row and dtype, None = as the level has it.
        only: positions in `plan` of the cases to run, in the order to run them; None = all. They are taken one by one,
            so that several processes can be dealt the cases of one run while it goes on.
        keep: told after each case, so that what was found outlives this process.

    Returns:
        A report; `report.ok` is the verdict, of a run of all cases.

    Raises:
        BackendUnavailableError: the backend is unknown or cannot run here. ConfigError: see `plan`, and xfails.txt.
    """
    here = place(backend, str(device))
    if here.missing:
        raise BackendUnavailableError(f"{here.info.id} cannot be run: {here.missing}")
    target = Installed(here.info.name, here.device)
    dtypes = _dtypes(dtypes)
    cases = plan(target, dtypes=dtypes, level=level, families=families, per_row=per_row)
    whole = not (dtypes or families or per_row)
    expected = read_xfails(target.info)
    if level == "full" and whole:
        no_unmatched(expected, (case.id for case in cases), target.info)
    report = _blank(target, cases, level, families)
    for flag, words in (("--dtypes", dtypes), ("--families", families)):
        report.command += f" {flag} {','.join(words)}" if words else ""
    begin = time.perf_counter()
    _control(report, target)
    for position in range(len(cases)) if only is None else only:
        case = cases[position]
        if progress is not None:
            progress(report.ran, len(cases), case.id)
        outcome = _expected(run_case(target, case), expected)
        report.add(outcome)
        report.seconds = time.perf_counter() - begin
        if keep is not None:
            keep(report, position)
        if outcome.findings and lost(target.device):
            report.lost = case.id
            break
    if only is None and report.complete:
        report.check_narrowing()
    if progress is not None:
        progress(report.ran, len(cases), "")
    report.seconds = time.perf_counter() - begin
    return report


def _expected(outcome: Outcome, lines: Iterable[Expected]) -> Outcome:
    """Return what becomes of a case that may be expected to fail."""
    line = expected_of(outcome.case.id, lines)
    if line is None:
        return outcome
    if outcome.verdict == "failed":
        return dataclasses.replace(outcome, verdict="xfailed")
    message = f"it is {outcome.verdict}, and {line.where} expects it to fail ({line.reason}): take the line out"
    return dataclasses.replace(outcome, verdict="failed", findings=(Finding("xfail", message),))


def _blank(target: Installed, cases: Sequence[Case], level: Level, families: Sequence[str] | None) -> Report:
    served = [case.request for case in cases if case.check not in ("refusal", "witness", "fault")]
    not_run = left_out(target.rows, target.facts, families or ALL_FAMILIES, target.name)
    recorded = [row for row in target.rows if holds_here(row, target.facts) and True in inside("graph_capture", row)]
    if recorded and not records_graphs(target.device):
        not_run.append(f"graph_capture: torch.{target.device.type} records no graphs here")
    if missing := tuple(p.name for p in target.info.providers if p not in target.providers):
        not_run.append(f"providers that are not here: {', '.join(missing)}")
    tried = [p for p in target.providers if families is None or any(_speaks_of(row, families) for row in p.rows)]
    absent = tuple(p.name for p in target.info.providers if p not in tried)
    origin = get_manager().owner(target.info).origin
    sources: tuple[str, ...] = ()
    unrecorded = ""
    try:
        sources = sources_of(origin, tried)
    except PluginError as exc:
        unrecorded = str(exc)
    return Report(
        backend=target.name,
        platform=target.platform,
        device=device_name(target.device),
        level=level,
        dtypes=tuple(dict.fromkeys(request.dtype for request in served)),
        families=tuple(dict.fromkeys(request.family for request in served)),
        versions=versions_of(target),
        date=datetime.date.today().isoformat(),
        command=f"polyattn conform {target.name} --{level} --device {target.device.type}",
        sources=sources,
        digest=source_hash(Path(origin).parent, sources),
        arch=target.facts.get("arch", ""),
        rows=row_hash(tried, target.facts.get("arch", "")),
        unrecorded=unrecorded,
        not_run=not_run,
        warnings=advice(target),
        absent=absent,
        total=len(cases),
    )


def _speaks_of(row: Row, families: Sequence[str]) -> bool:
    """Return whether a capability row may be of one of these families."""
    said = row.when.get("family")
    return said is None or any(said.reason(family) is None for family in families)


def versions_of(target: Installed) -> dict[str, str]:
    """Return the versions of the machine and of the distributions that its providers need."""
    needs = [need for provider in target.providers for need in provider.requires]
    found = {name: distribution_version(name) for need in needs for name in (need.distribution, *need.also)}
    libraries = {name: version for name, version in found.items() if version and name != "torch"}
    return {**versions(target.device), **libraries}


def _control(report: Report, target: Installed) -> None:
    with one_thread():
        for dtype in report.dtypes:
            for control in controls(DTYPES[dtype], target.device, target.accuracy):
                report.gates[f"{dtype}: {control.name}"] = control.held
