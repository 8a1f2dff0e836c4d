"""A report becomes evidence, beside the plugin whose backend it is about; so does a run of a vendor's own code.

Evidence is refreshed where only the text of its sources has changed.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..registry.evidence import Evidence, evidence_file, read_evidence, row_hash, source_hash, write_evidence
from ..registry.manager import get_manager
from .calls import is_interpreted
from .code_digest import code_digest
from .report import UNTRIED, Report
from .sources import sources_of

__all__ = ["evidence_of", "record", "record_compiled", "record_vendor_code", "refresh", "stale"]


def record(report: Report) -> Path:
    """Write a report as evidence beside the plugin that owns the backend; the file's path.

    Raises:
        ConfigError: as `evidence_of`. OSError: the place cannot be written to.
    """
    evidence = evidence_of(report)
    return write_evidence(_origin(report), evidence)


def record_vendor_code(
    backend: str, providers: tuple[str, ...], *, passed: int, versions: Mapping[str, str], command: str, note: str
) -> Path:
    """Write as evidence that a vendor's own code ran off its chip behind these providers, and agreed; the file's path.

    Args:
        backend: name@platform. providers: by which it was reached; of the others it shows nothing. passed: cases of the
            kit. versions: of the vendor's packages and of what ran them. note: what of the code ran, and how.

    Raises:
        ConfigError: nothing passed, or there is evidence of the device itself, which shows more.
    """
    run = _off_chip("vendor code", backend, providers, passed, versions=dict(versions), command=command, note=note)
    return write_evidence(_origin_of(backend), run)


def record_compiled(
    backend: str, providers: tuple[str, ...], families: tuple[str, ...], *, kernels: Mapping[str, int],
    versions: Mapping[str, str], command: str, note: str,
) -> Path:  # fmt: skip
    """Write as evidence that all kernels of these providers were compiled for chips that are not here; the file's path.

    That they compute the right numbers is for the interpreter to show, in the plugin's own tests.

    Args:
        backend, providers, versions, note: as `record_vendor_code`. families: that they serve. kernels: architecture ->
            how many were compiled, none of which asked for more than the chip has.

    Raises:
        ConfigError: as `record_vendor_code`.
    """
    how: dict[str, Any] = {"versions": dict(versions), "command": command, "note": note, "families": families}
    runs = [
        _off_chip("compiled", backend, providers, count, arch=arch, device=", ".join(kernels), **how)
        for arch, count in kernels.items()
    ]
    if not runs:
        raise ConfigError(f"evidence of {backend} is not written: it was compiled for no architecture")
    return write_evidence(_origin_of(backend), *runs)


def _origin_of(backend: str) -> str:
    manager = get_manager()
    name, _, platform = backend.partition("@")
    return manager.owner(manager.backends[name, platform]).origin


def _off_chip(
    level: str, backend: str, providers: tuple[str, ...], passed: int, *, arch: str = "", **more: Any
) -> Evidence:
    name, _, platform = backend.partition("@")
    info, origin = get_manager().backends[name, platform], _origin_of(backend)
    chosen = [provider for provider in info.providers if provider.name in providers]
    if not passed or len(chosen) != len(providers):
        raise ConfigError(f"evidence of {backend} is not written: {passed} cases of {', '.join(providers)} passed")
    if read_evidence(origin, name, platform).level == "hardware":
        raise ConfigError(f"evidence of {backend} is not written: there is some of the device itself, which shows more")
    return Evidence(
        backend=name,
        platform=platform,
        level=level,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        passed=passed,
        sources=sources_of(origin, chosen),
        code=code_digest(chosen),
        absent=tuple(p.name for p in info.providers if p not in chosen and not p.planned),
        arch=arch,
        rows=row_hash(chosen, arch),
        **more,
    )


def refresh(backend: str, platform: str) -> Path | None:
    """Say in a backend's evidence where its code is now, if that is the code that ran.

    Comments, docstrings, names of definitions and the files that they are in may have changed: then the evidence reads
    stale, and shows as much as before.

    Returns:
        The file, or None where nothing is to be said: it is not stale, its code has changed, or a run of an earlier
        polyattn did not keep what its code was.

    Raises:
        PluginError: an adapter's module cannot be found, or its evidence cannot be read. OSError: it cannot be written.
    """
    manager = get_manager()
    info = manager.backends[backend, platform]
    origin = manager.owner(info).origin
    before = read_evidence(origin, backend, platform)

    def moved(run: Evidence) -> Evidence:
        tried = [one for one in info.providers if one.name not in run.absent and not one.planned]
        if not run.stale or not run.code or run.code != code_digest(tried):
            return run
        sources = sources_of(origin, tried)
        return dataclasses.replace(run, sources=sources, digest=source_hash(Path(origin).parent, sources), stale=False)

    after = dataclasses.replace(moved(before), others=tuple(map(moved, before.others)))
    if after == before:
        return None
    path = evidence_file(origin, backend, platform)
    path.write_text(after.to_json(), encoding="utf-8")
    read_evidence.cache_clear()
    return path


def _origin(report: Report) -> str:
    return _origin_of(f"{report.backend}@{report.platform}")


def evidence_of(report: Report) -> Evidence:
    """Return what a report shows.

    It is of level `hardware`; on a CPU, kernels that Triton interprets there are evidence of level `interpreter`.
    The report may come from another machine, as long as the same sources ran there.

    Raises:
        ConfigError: the run found something or left something out, nothing passed, the gates could not tell right from
            wrong, the sources have changed or are in no file.
    """
    which = f"evidence of {report.backend}@{report.platform} is not written"
    if not report.ok:
        raise ConfigError(f"{which}: {_why_not(report)}")
    if report.unrecorded:
        raise ConfigError(f"{which}: {report.unrecorded}")
    info = get_manager().backends[report.backend, report.platform]
    if stale(report):
        raise ConfigError(f"{which}: {', '.join(report.sources)} are not what ran on {report.date}. Run again")
    said = f"families: {', '.join(report.families)}; dtypes: {', '.join(report.dtypes)}"
    interpreted = is_interpreted(info)
    evidence = Evidence(
        backend=report.backend,
        platform=report.platform,
        level="interpreter" if interpreted else "hardware",
        device=report.device,
        versions=dict(report.versions),
        date=report.date,
        command=report.command,
        passed=report.passed,
        refused=report.refused,
        xfailed=report.xfailed,
        note="; ".join([said, *(f"not run: {reason}" for reason in report.not_run)]),
        sources=report.sources,
        digest=report.digest,
        code=code_digest(provider for provider in info.providers if provider.name not in report.absent),
        absent=report.absent,
        arch=report.arch,
        rows=report.rows,
        families=tuple(report.families),
        reached=report.reached,
    )
    if evidence.beside(info.providers).stale:
        raise ConfigError(f"{which}: it declares other capabilities than were tried on {report.date}. Run again")
    return evidence


def stale(report: Report) -> bool:
    """Return whether the sources are not those that ran."""
    return source_hash(Path(_origin(report)).parent, report.sources) != report.digest


def _why_not(report: Report) -> str:
    """Say why a report that is not ok is none."""
    if report.lost:
        return f"the device was lost after {report.lost}. Repair that case and run again"
    if report.findings:
        return f"{report.failed} of {report.ran} cases failed. Repair them and run again"
    if not report.complete:
        return f"{report.total - report.ran} of {report.total} cases were not run. Run them too"
    if not report.passed:
        return UNTRIED
    passed = ", ".join(name for name, held in report.gates.items() if not held)
    return f"the gates do not tell right from wrong on this device ({passed}). See what its float32 sums are made of"
