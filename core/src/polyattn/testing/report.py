"""What a run of conformance found, for people and for files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from .checks import Outcome

__all__ = ["Report"]


@dataclasses.dataclass
class Report:
    """Counts, findings and how close every check came to its bound.

    Attributes:
        backend, platform, device, level, dtypes, families: what was run. versions: of everything involved.
        date: of the run. seconds: it took. command: that repeats it.
        sources, digest: the files that ran, relative to the plugin's folder, and their hash.
        counts: "family dtype" or "refusals" -> passed, refused, failed.
        findings: case -> what is wrong with it.
        margins: "check dtype" -> (the largest share of its allowance that was used, the case).
        gates: "dtype: control" -> whether the gates did what they must, see `polyattn.testing.controls`.
        not_run: what is declared and was not tried, with the reason.
        total: cases there are; lost: the case after which the device could not be used any more.
    """

    backend: str
    platform: str
    device: str
    level: str
    dtypes: tuple[str, ...]
    families: tuple[str, ...]
    versions: Mapping[str, str]
    date: str
    command: str
    sources: tuple[str, ...] = ()
    digest: str = ""
    seconds: float = 0.0
    counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    findings: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    margins: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    gates: dict[str, bool] = dataclasses.field(default_factory=dict)
    not_run: list[str] = dataclasses.field(default_factory=list)
    total: int = 0
    lost: str = ""

    @property
    def passed(self) -> int:
        return self._count("passed")

    @property
    def refused(self) -> int:
        return self._count("refused")

    @property
    def failed(self) -> int:
        return self._count("failed")

    @property
    def ran(self) -> int:
        return self.passed + self.refused + self.failed

    @property
    def ok(self) -> bool:
        """Everything was run, nothing was found, and the gates can tell right from wrong."""
        return not self.findings and not self.lost and self.ran > 0 and all(self.gates.values())

    def _count(self, verdict: str) -> int:
        return sum(count.get(verdict, 0) for count in self.counts.values())

    def add(self, outcome: Outcome) -> None:
        request = outcome.case.request
        name = "refusals" if outcome.case.check == "refusal" else f"{request.family} {request.dtype}"
        count = self.counts.setdefault(name, {})
        count[outcome.verdict] = count.get(outcome.verdict, 0) + 1
        if outcome.findings:
            self.findings[outcome.case.id] = [str(finding) for finding in outcome.findings]
        for check, margin in outcome.margins.items():
            self._margin(f"{check} {request.dtype}", margin, outcome.case.id)

    def _margin(self, name: str, margin: float, case: str) -> None:
        if name not in self.margins or margin > self.margins[name][0]:
            self.margins[name] = (margin, case)

    def absorb(self, other: Report) -> None:
        """Add what another part of the same run found."""
        for name, count in other.counts.items():
            mine = self.counts.setdefault(name, {})
            for verdict, number in count.items():
                mine[verdict] = mine.get(verdict, 0) + number
        for name, (margin, case) in other.margins.items():
            self._margin(name, margin, case)
        self.findings.update(other.findings)
        self.gates.update(other.gates)
        self.not_run = list(dict.fromkeys([*self.not_run, *other.not_run]))
        self.seconds += other.seconds
        self.total += other.total
        self.lost = self.lost or other.lost

    def to_dict(self) -> dict[str, Any]:
        summary = {"ok": self.ok, "passed": self.passed, "refused": self.refused, "failed": self.failed}
        return {**summary, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, default=str)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that `to_dict` wrote."""
        names = {field.name for field in dataclasses.fields(cls)}
        given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items() if n in names}
        report = cls(**given)
        report.not_run = list(report.not_run)
        report.margins = {name: (margin, case) for name, (margin, case) in report.margins.items()}
        return report

    def __str__(self) -> str:
        lines = [f"{self.backend}@{self.platform} on {self.device}", f"  {', '.join(_pairs(self.versions))}"]
        rows: list[tuple[str, ...]] = [("", "passed", "refused", "failed")]
        for name, count in sorted(self.counts.items()):
            rows.append((name, *(str(count.get(verdict, 0)) for verdict in ("passed", "refused", "failed"))))
        rows.append(("all", str(self.passed), str(self.refused), str(self.failed)))
        lines += ["  " + line for line in _table(rows)]
        used = sorted(self.margins.items(), key=lambda item: -item[1][0])[:5]
        lines += [f"  closest to its bound: {name}, {margin:.0%} of it ({case})" for name, (margin, case) in used[:1]]
        broken = [name for name, held in self.gates.items() if not held]
        lines.append(f"  negative controls: {len(self.gates) - len(broken)} of {len(self.gates)} as they must be")
        lines += [f"  CONTROL FAILED {name}" for name in broken]
        lines += [f"  not run: {reason}" for reason in self.not_run]
        lines += [f"  FAILED {case}\n    " + "\n    ".join(found) for case, found in list(self.findings.items())[:20]]
        if len(self.findings) > 20:
            lines.append(f"  and {len(self.findings) - 20} more")
        if self.lost:
            lines.append(f"  THE DEVICE WAS LOST after {self.lost}: {self.total - self.ran} cases were not run")
        lines.append(f"  {'ok' if self.ok else 'FAILED'}, {self.ran} cases in {self.seconds:.1f} s")
        return "\n".join(lines)


def _pairs(versions: Mapping[str, str]) -> Iterable[str]:
    return (f"{name} {version}" for name, version in versions.items())


def _table(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
