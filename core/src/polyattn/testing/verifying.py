"""This module shows what works on a person's chip: conformance of all that is installed there, as files to hand in.

`polyattn verify` runs it. Evidence goes into a folder, not into the installed packages: who hands it in puts each file
beside the plugin that it is about.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import BackendUnavailableError, ConfigError, PolyattnError, did_you_mean
from ..registry.evidence import Evidence
from ..registry.manager import get_manager
from ..selection.inspection import BackendStatus, list_backends
from .recording import evidence_of
from .report import Report

__all__ = ["DEFINITION", "Verified", "markdown", "prepare", "verifiable", "write"]

DEFINITION = "reference"
"""What conformance measures others by; it is not verified."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """Describes one backend on the device.

    Attributes:
        name, platform: of it. report: of its conformance; None where it was not run.
        evidence: None where there is none, and `why_not` says why.
    """

    name: str
    platform: str
    report: Report | None = None
    evidence: Evidence | None = None
    why_not: str = ""

    @classmethod
    def of(cls, report: Report) -> Verified:
        """A run: evidence, or why it is none."""
        if report.ok and report.level != "full":
            return cls(report.backend, report.platform, report, None, f"a {report.level} run is no evidence")
        try:
            evidence = evidence_of(report)
        except ConfigError as exc:
            return cls(report.backend, report.platform, report, None, str(exc))
        return cls(report.backend, report.platform, report, evidence)

    @property
    def ok(self) -> bool:
        """Return whether the backend was run and nothing was found."""
        return self.report is not None and self.report.ok


def verifiable(platform: str, patterns: Sequence[str]) -> tuple[list[str], list[Verified]]:
    """(backends to run on this platform, those that cannot be run with the reason).

    Raises:
        ConfigError: a pattern that names no backend of the platform. BackendUnavailableError: none can be run.
    """
    known = [status for status in list_backends(platform) if status.name != DEFINITION]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(status.name, pattern) for status in known):
            names = [status.name for status in known]
            raise ConfigError(
                f"--backend {pattern!r} names no backend of {platform}.{did_you_mean(pattern, names)} "
                f"There are: {', '.join(names)}"
            )
    wanted = [status for status in known if any(fnmatch.fnmatchcase(status.name, p) for p in patterns or ("*",))]
    ready = [status.name for status in wanted if status.status == "available"]
    if not ready:
        raise BackendUnavailableError(
            f"nothing can be run on {platform}: "
            + "; ".join(f"{status.name}: {_reason(status)}" for status in wanted)
            + ". `polyattn doctor` says what to install"
        )
    return ready, [Verified(s.name, platform, why_not=_reason(s)) for s in wanted if s.name not in ready]


def _reason(status: BackendStatus) -> str:
    return "; ".join(status.reasons) or status.status


def prepare(folder: Path) -> None:
    """Make the folder that `write` fills, before anything is measured.

    Raises:
        ConfigError: it cannot be made, or there is something in it.
    """
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"--out {folder}: there is something in it. Name another folder, or remove this one")
        (folder / "evidence").mkdir(parents=True)
    except OSError as exc:
        raise ConfigError(
            f"--out {folder}: {exc.strerror}. Name a folder that can be made, or remove this one"
        ) from exc


def write(folder: Path, verified: Sequence[Verified], text: str) -> list[Path]:
    """Fill a folder: report.md, report.json with every report, and evidence/ with what is evidence."""
    files = [folder / "report.md", folder / "report.json"]
    files[0].write_text(text, encoding="utf-8")
    reports = [entry.report.to_dict() for entry in verified if entry.report is not None]
    files[1].write_text(json.dumps(reports, indent=1, default=str) + "\n", encoding="utf-8")
    for entry in verified:
        if entry.evidence is not None:
            files.append(folder / "evidence" / f"{entry.name}@{entry.platform}.json")
            files[-1].write_text(entry.evidence.to_json(), encoding="utf-8")
    return files


def markdown(verified: Sequence[Verified], benchmark: str) -> str:
    """The report of a run, for people. benchmark: of the same device, as Markdown."""
    return "\n".join([*_lines(verified), "", "## How fast", "", benchmark.strip(), ""])


def _lines(verified: Sequence[Verified]) -> Iterator[str]:
    reports = [entry.report for entry in verified if entry.report is not None]
    first = reports[0]
    yield f"# Verification on {first.device}"
    yield ""
    yield f"{first.date}, {first.platform}; {first.software}."
    yield ""
    yield "## What conforms"
    yield ""
    yield "| backend | verdict | passed | refused | xfailed | failed | evidence |"
    yield "|---|---|---:|---:|---:|---:|---|"
    for entry in verified:
        if entry.report is None:
            yield f"| `{entry.name}` | not run: {entry.why_not} | | | | | |"
            continue
        r = entry.report
        verdict = "conforms" if r.ok else "**does not conform**"
        kept = _place(entry) if entry.evidence is not None else f"none: {entry.why_not}"
        yield f"| `{entry.name}` | {verdict} | {r.passed} | {r.refused} | {r.xfailed} | {r.failed} | {kept} |"
    for report in reports:
        yield ""
        yield f"### {report.headline}"
        yield ""
        yield "```text"
        yield from (part for line in report.remarks() for part in line.split("\n"))
        yield report.verdict
        yield "```"
        yield f"Again: `{report.command}`"


def _place(entry: Verified) -> str:
    """Return the name and the folder of an entry's evidence file."""
    manager = get_manager()
    try:
        owner = manager.owner(manager.backends[entry.name, entry.platform])
    except (KeyError, PolyattnError):
        return f"`evidence/{entry.name}@{entry.platform}.json`"
    package = (owner.module or owner.name).rpartition(".")[0] or owner.name
    return f"`evidence/{entry.name}@{entry.platform}.json`, for `{package.replace('.', '/')}/evidence/`"
