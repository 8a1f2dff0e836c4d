"""This module collects what checks find: findings, margins, and what became of the case."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from ...contract import Accuracy
from ..cases import Case
from ..tolerances import Finding, Kind, compare, compare_class

__all__ = ["Notes", "Outcome", "Verdict"]

Verdict = Literal["passed", "refused", "xfailed", "failed"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Describes what became of one case.

    Attributes:
        verdict: passed; refused, as it must be; xfailed, it fails and xfails.txt says why; or failed.
        margins: for each check, how much of its allowance was used (1 = all of it).
    """

    case: Case
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    margins: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return "\n  ".join([f"{self.case.id}: {self.verdict}", *map(str, self.findings)])


class Notes:
    """Collects findings and margins of one case. accuracy: the class of what is judged, None = exact."""

    def __init__(self, case: Case, dtype: torch.dtype, accuracy: Accuracy | None = None) -> None:
        self.case, self.dtype, self.accuracy = case, dtype, accuracy
        self.findings: list[Finding] = []
        self.margins: dict[str, float] = {}

    def wrong(self, check: str, message: str) -> None:
        self.findings.append(Finding(check, message))

    def compare(
        self,
        name: str,
        actual: Tensor,
        right: Tensor,
        plain: Tensor,
        kind: Kind = "out",
        floor: Callable[[], Tensor] | None = None,
    ) -> None:
        """Hold a result called `name` against both gates, or its class. `floor`: the error that is forgiven element by
        element, asked for only where it matters."""
        if self.accuracy is not None:
            finding, margin = compare_class(name, actual, right, self.dtype, self.accuracy, kind)
            self._note(name, finding, margin)
            return
        softcap = self.case.request.softcap > 0
        # Sinks may be float32 beside float64 queries: their gradient is no finer than they are.
        coarse = actual.dtype == torch.float32 and kind == "grad" and self.dtype == torch.float64
        dtype = torch.float32 if coarse else self.dtype
        finding, margin = compare(name, actual, right, plain, dtype, softcap, kind)
        if finding is not None and floor is not None and actual.shape == right.shape:
            finding, margin = compare(name, actual, right, plain, dtype, softcap, kind, floor())
        self._note(name, finding, margin)

    def _note(self, name: str, finding: Finding | None, margin: float) -> None:
        self.margins[name] = max(margin, self.margins.get(name, 0.0))
        if finding is not None:
            self.findings.append(finding)

    def same(self, check: str, message: str, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        """Results that must have the same bits, by name."""
        for name, tensor in first.items():
            if not torch.equal(tensor, second[name]):
                self.wrong(check, f"{name}: {message}")
