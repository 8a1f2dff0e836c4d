"""This module reports what a run of conformance found, to people and to files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from .cases import Case
from .checks import Outcome

__all__ = ["VERDICTS", "Report"]

VERDICTS = ("passed", "refused", "xfailed", "failed")

UNTRIED = (
    "nothing that the rows declare was tried and passed; see which dtypes, families and machines they name, and with "
    "what the run was narrowed"
)


@dataclasses.dataclass
class Report:
    """Counts, findings and how close every check came to its bound.

    Attributes:
        backend, platform, device, level, dtypes, families: what was run; "none" is no device yet, several have " and "
            between them. versions: of everything involved.
        date: of the run. seconds: it took. command: that repeats it.
        sources, digest: the files that ran, relative to the plugin's folder, and their hash. unrecorded: why there are
            none, so that the run cannot become evidence. arch, rows: of the device, and the hash of what is declared
            for it.
        counts: "family dtype", "witnesses" or "refusals" -> passed, refused, xfailed, failed.
        findings: case -> what is wrong with it. xfails: the same of cases that are expected to fail.
        margins: "check dtype" -> (the largest share of its allowance that was used, the case).
        gates: "dtype: control" -> whether the gates did what they must, see `polyattn.testing.negative`.
        reached: family -> queries, keys and grid (sequences x heads), the most of a case that passed.
        not_run: what is declared and was not tried, with the reason. warnings: of what is no fault and will surprise
            users. absent: providers that were not there, or have other families.
        total: cases there are, also where this is a part of a run; lost: the case after which the device could not be
            used any more.
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
    arch: str = ""
    rows: str = ""
    unrecorded: str = ""
    seconds: float = 0.0
    counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    findings: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    xfails: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    margins: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    gates: dict[str, bool] = dataclasses.field(default_factory=dict)
    reached: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    not_run: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    absent: tuple[str, ...] = ()
    total: int = 0
    lost: str = ""

    @property
    def passed(self) -> int:
        return self._count("passed")

    @property
    def refused(self) -> int:
        return self._count("refused")

    @property
    def xfailed(self) -> int:
        return self._count("xfailed")

    @property
    def failed(self) -> int:
        return self._count("failed")

    @property
    def ran(self) -> int:
        return sum(self._count(verdict) for verdict in VERDICTS)

    @property
    def complete(self) -> bool:
        """Every case was run."""
        return self.ran == self.total

    @property
    def ok(self) -> bool:
        """Return whether everything ran, something passed, nothing was found, and the gates can tell right from
        wrong."""
        clean = not self.findings and not self.lost and all(self.gates.values())
        return clean and self.complete and self.passed > 0

    def _count(self, verdict: str) -> int:
        return sum(count.get(verdict, 0) for count in self.counts.values())

    @staticmethod
    def heading(case: Case) -> str:
        """Under which name of `counts` a case is counted."""
        judged = {"refusal": "refusals", "witness": "witnesses", "fault": "known faults"}
        return judged.get(case.check, f"{case.request.family} {case.request.dtype}")

    def add(self, outcome: Outcome) -> None:
        request = outcome.case.request
        count = self.counts.setdefault(self.heading(outcome.case), {})
        count[outcome.verdict] = count.get(outcome.verdict, 0) + 1
        if outcome.findings:
            where = self.xfails if outcome.verdict == "xfailed" else self.findings
            where[outcome.case.id] = [str(finding) for finding in outcome.findings]
        if outcome.verdict == "passed":
            queries, keys = outcome.case.longest
            self._reach(request.family, queries=queries, keys=keys, grid=len(outcome.case.lengths) * request.heads)
        for check, margin in outcome.margins.items():
            self._margin(f"{check} {request.dtype}", margin, outcome.case.id)

    def _margin(self, name: str, margin: float, case: str) -> None:
        if name not in self.margins or margin > self.margins[name][0]:
            self.margins[name] = (margin, case)

    def _reach(self, family: str, **most: int) -> None:
        mine = self.reached.setdefault(family, {})
        for name, number in most.items():
            mine[name] = max(number, mine.get(name, 0))

    def check_narrowing(self) -> None:
        """Check that a backend serves some of what its rows declare: a hook that refuses all of it makes them
        untrue."""
        for name, count in self.counts.items():
            if name not in ("refusals", "witnesses", "known faults") and set(count) == {"refused"}:
                refused = f"the hook refuses all {count['refused']} cases that the rows declare"
                self.findings[name] = [f"narrowing: {refused}. Declare less"]
                count["failed"] = count.pop("refused")

    def absorb(self, other: Report) -> None:
        """Add what another part of the same run found. Its devices are of one architecture; each is named."""
        names = dict.fromkeys([*other.device.split(" and "), *self.device.split(" and ")])
        self.device = " and ".join(name for name in names if name != "none") or "none"
        for name, count in other.counts.items():
            mine = self.counts.setdefault(name, {})
            for verdict, number in count.items():
                mine[verdict] = mine.get(verdict, 0) + number
        for name, (margin, case) in other.margins.items():
            self._margin(name, margin, case)
        for family, most in other.reached.items():
            self._reach(family, **most)
        self.findings.update(other.findings)
        self.xfails.update(other.xfails)
        self.gates.update(other.gates)
        self.not_run = list(dict.fromkeys([*self.not_run, *other.not_run]))
        self.warnings = list(dict.fromkeys([*self.warnings, *other.warnings]))
        self.seconds += other.seconds
        self.total = max(self.total, other.total)
        self.lost = self.lost or other.lost

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **{v: self._count(v) for v in VERDICTS}, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, default=str)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that `to_dict` wrote."""
        names = {field.name for field in dataclasses.fields(cls)}
        given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items() if n in names}
        report = cls(**given)
        report.not_run, report.warnings = list(report.not_run), list(report.warnings)
        report.margins = {name: (margin, case) for name, (margin, case) in report.margins.items()}
        return report

    def table(self) -> list[tuple[str, ...]]:
        """A heading and a row of counts for each family and dtype, the sums last."""
        rows: list[tuple[str, ...]] = [("", *VERDICTS)]
        for name, count in sorted(self.counts.items()):
            rows.append((name, *(str(count.get(verdict, 0)) for verdict in VERDICTS)))
        return [*rows, ("all", *(str(self._count(verdict)) for verdict in VERDICTS))]

    def remarks(self, most: int = 20) -> list[str]:
        """Return what a reader must know beside the counts, a line each; of findings the first `most`."""
        used = sorted(self.margins.items(), key=lambda item: -item[1][0])[:1]
        lines = [f"closest to its bound: {name}, {margin:.0%} of it ({case})" for name, (margin, case) in used]
        for family, of in sorted(self.reached.items()):
            reach = f"{of['queries']:,} queries, {of['keys']:,} keys, {of['grid']:,} sequences x heads"
            lines.append(f"up to: {reach} ({family})")
        broken = [name for name, held in self.gates.items() if not held]
        lines.append(f"negative controls: {len(self.gates) - len(broken)} of {len(self.gates)} as they must be")
        lines += [f"CONTROL FAILED {name}" for name in broken]
        lines += [f"not run: {reason}" for reason in self.not_run]
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"xfailed {case}: {found[0]}" for case, found in list(self.xfails.items())[:most]]
        lines += [f"FAILED {case}\n  " + "\n  ".join(found) for case, found in list(self.findings.items())[:most]]
        lines += [f"and {len(some) - most} more" for some in (self.findings,) if len(some) > most]
        left = f"{self.total - self.ran} cases were not run"
        if self.lost:
            lines.append(f"THE DEVICE WAS LOST after {self.lost}: {left}")
        elif not self.complete:
            lines.append(f"NOT COMPLETE: {left}")
        elif not self.passed and not self.findings:
            lines.append(f"FAILED {UNTRIED}")
        return lines

    @property
    def headline(self) -> str:
        return f"{self.backend}@{self.platform} on {self.device}"

    @property
    def verdict(self) -> str:
        return f"{'ok' if self.ok else 'FAILED'}, {self.ran} cases in {self.seconds:.1f} s"

    @property
    def software(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def __str__(self) -> str:
        lines = [self.software, *_table(self.table()), *self.remarks(), self.verdict]
        return "\n".join([self.headline, *(f"  {part}" for line in lines for part in line.split("\n"))])


def _table(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
