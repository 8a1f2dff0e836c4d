"""Conformance of one backend on one device: every declared capability is tried, everything else must be refused."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from .. import __version__
from ..errors import ConfigError, did_you_mean
from ..evidence import Evidence, source_hash, write_evidence
from ..plugins import get_manager
from ..records import FAMILIES as ALL_FAMILIES
from .calls import Installed
from .cases import Case
from .checks import run_case
from .controls import controls
from .families import DTYPES, FAMILIES
from .generate import LEVELS, Level, generate, refusals
from .report import Report
from .sources import sources_of
from .values import inside

__all__ = ["FLOATS", "PER_ROW", "Progress", "plan", "record", "run"]

Progress = Callable[[int, int, str], None]
"""Called with (cases done, cases in all, the next case's id)."""

FLOATS = ("float64", "float32", "bfloat16", "float16")

PER_ROW: Mapping[str, Mapping[Level, int]] = {"flex_attention": {"quick": 10, "full": 80}}
"""Backends that compile a program for each request: seconds each, so there are fewer cases of combined fields."""


def plan(
    target: Installed,
    *,
    dtypes: Sequence[str] | None = None,
    level: Level = "quick",
    families: Sequence[str] | None = None,
    per_row: int | None = None,
) -> list[Case]:
    """The cases of a run, in an order that never changes. Arguments as `run`.

    Raises:
        ConfigError: a level, dtype or family that does not exist, or none of them that the kit computes.
    """
    _known("level", (level,), tuple(LEVELS))
    _known("dtype", dtypes or (), FLOATS)
    _known("family", families or (), ALL_FAMILIES)
    count = per_row or PER_ROW.get(target.name, LEVELS)[level]
    dtypes = tuple(dtypes or FLOATS)
    chosen = tuple(families or ALL_FAMILIES)
    computed = [family for family in chosen if family in FAMILIES]
    served = generate(target.rows, target.facts, families=computed, dtypes=dtypes, per_row=count)
    served = [case for case in served if not case.request.large]
    return [*served, *refusals(target.rows, target.facts, families=chosen, dtypes=dtypes)]


def _known(what: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    for word in given:
        if word not in allowed:
            raise ConfigError(f"{what} {word!r} is not one of {', '.join(allowed)}.{did_you_mean(word, allowed)}")


def run(
    backend: str,
    *,
    device: str | torch.device = "cpu",
    dtypes: Sequence[str] | None = None,
    level: Level = "quick",
    families: Sequence[str] | None = None,
    progress: Progress | None = None,
    per_row: int | None = None,
    shard: tuple[int, int] = (0, 1),
    start: int = 0,
    stop: int | None = None,
) -> Report:
    """Run the conformance of a backend.

    Args:
        backend: its name. device: where. dtypes, families: those to look at, None = all.
        level: `quick` (minutes at most) or `full`.
        progress: told before each case.
        per_row: cases of combined fields for each capability row and dtype, None = as the level has it.
        shard: (i, n) takes every n-th case from the i-th on, so that n processes share a run. start, stop: the part
            of the shard's cases to run, to go on after one that lost the device.

    Returns:
        A report; `report.ok` is the verdict.

    Raises:
        BackendUnavailableError: the backend is unknown or cannot run here. ConfigError: see `plan`.
    """
    target = Installed(backend, device)
    cases = plan(target, dtypes=dtypes, level=level, families=families, per_row=per_row)
    cases = cases[shard[0] :: shard[1]][start:stop]
    report = _blank(target, cases, level)
    for flag, words in (("--dtypes", dtypes), ("--families", families), ("--per-row", per_row and [str(per_row)])):
        report.command += f" {flag} {','.join(words)}" if words else ""
    begin = time.perf_counter()
    if start == 0:
        _control(report, target.device)
    for number, case in enumerate(cases):
        if progress is not None:
            progress(number, len(cases), case.id)
        outcome = run_case(target, case)
        report.add(outcome)
        if outcome.findings and _lost(target.device):
            report.lost = case.id
            break
    if progress is not None:
        progress(report.ran, len(cases), "")
    report.seconds = time.perf_counter() - begin
    return report


def _blank(target: Installed, cases: Sequence[Case], level: Level) -> Report:
    served = [case.request for case in cases if case.check != "refusal"]
    not_run = []
    if any(True in inside("large", row) for row in target.rows):
        not_run.append("large: a tensor of 2**31 elements does not fit a test")
    if planned := [p.name for p in target.info.providers if p not in target.providers]:
        not_run.append(f"providers that are not here: {', '.join(planned)}")
    origin = get_manager().owner(target.info).origin
    sources = sources_of(origin, target.providers)
    return Report(
        backend=target.name,
        platform=target.platform,
        device=_device_name(target.device),
        level=level,
        dtypes=tuple(dict.fromkeys(request.dtype for request in served)),
        families=tuple(dict.fromkeys(request.family for request in served)),
        versions=_versions(target.device),
        date=datetime.date.today().isoformat(),
        command=f"python -m polyattn.testing {target.name} --device {target.device.type} --level {level}",
        sources=sources,
        digest=source_hash(Path(origin).parent, sources),
        not_run=not_run,
        total=len(cases),
    )


def _control(report: Report, device: torch.device) -> None:
    for dtype in report.dtypes:
        for control in controls(DTYPES[dtype], device):
            report.gates[f"{dtype}: {control.name}"] = control.held


def _lost(device: torch.device) -> bool:
    """Whether the device answers no more: errors of a kernel that read where it must not stay for good."""
    if device.type == "cpu":
        return False
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _versions(device: torch.device) -> dict[str, str]:
    found = {"polyattn": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found["hip" if torch.version.hip else "cuda"] = torch.version.hip or torch.version.cuda or ""
        found["triton"] = _installed("triton")
        found["driver"] = _driver()
    return {name: version for name, version in found.items() if version}


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    """Version of NVIDIA's driver; empty where its tool is not there to tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip().splitlines()[0] if said.stdout.strip() else ""


def record(report: Report) -> Path:
    """Write a report as evidence of level `hardware` beside the plugin that owns the backend; the file's path.

    The report may come from another machine, as long as the same sources ran there.

    Raises:
        ConfigError: the run found something, the gates could not tell right from wrong, or the sources have changed.
    """
    which = f"evidence of {report.backend}@{report.platform} is not written"
    if not report.ok:
        raise ConfigError(f"{which}: {report.failed} of {report.ran} cases failed. Repair them and run again")
    manager = get_manager()
    origin = manager.owner(manager.backends[report.backend, report.platform]).origin
    if source_hash(Path(origin).parent, report.sources) != report.digest:
        raise ConfigError(f"{which}: {', '.join(report.sources)} are not what ran on {report.date}. Run again")
    tried = f"families: {', '.join(report.families)}; dtypes: {', '.join(report.dtypes)}"
    evidence = Evidence(
        backend=report.backend,
        platform=report.platform,
        level="hardware",
        device=report.device,
        versions=dict(report.versions),
        date=report.date,
        command=report.command,
        passed=report.passed,
        refused=report.refused,
        note="; ".join([tried, *(f"not run: {reason}" for reason in report.not_run)]),
        sources=report.sources,
    )
    return write_evidence(origin, evidence)
