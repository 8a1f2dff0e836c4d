"""The answer of selection, for code and for people."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from ..contract import AttentionRequest
from ..lowering import Plan

__all__ = ["RULE", "Selection"]

RULE = "rule of "


@dataclasses.dataclass(frozen=True)
class Selection:
    """The answer, for code and for people.

    Attributes:
        request: the request in normal form. backend, platform, provider: who serves it.
        lowerings: exact rewrites between the request and the kernel, in order. plan: what they do and what they cost
            (None where there are none, or the adapter is planned).
        source: what decided (`argument`, `use_backend`, ..., `tuned`, `cost model`, `platform rule`, `priority`,
            `lowering` where nothing takes the request as it is, `fallback from X`, or `rule of X` where X leaves such
            calls to others). why: the sentence behind it.
        rejected: every other backend that was asked and refused, with its reasons.
        others: backends that would serve it too. planned: the adapter is not built in this version (what-if only).
        evidence: how far the backend was shown to work here. notes: what else a reader should know.
        rewritable: backends that refused it as it is and that exact rewrites would make serve it, with the rewrites
            (complete where `select` was asked for everything).
        inner: of a method that is explained, the calls that it makes.
    """

    request: AttentionRequest
    backend: str
    platform: str
    provider: str
    lowerings: tuple[str, ...] = ()
    plan: Plan | None = None
    source: str = ""
    why: str = ""
    rejected: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    others: tuple[str, ...] = ()
    planned: bool = False
    evidence: str = "declared"
    notes: tuple[str, ...] = ()
    rewritable: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    inner: tuple[Selection, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.backend}@{self.platform}"

    @property
    def fallback(self) -> bool:
        return self.source.startswith("fallback")

    @property
    def rule(self) -> str:
        """The backend that was asked for and leaves the call to others by a rule of its own; "" where there is none."""
        return self.source.removeprefix(RULE) if self.source.startswith(RULE) else ""

    def left_by(self, backend: str, why: str) -> Selection:
        """The same, for a call that a backend leaves to others by a rule."""
        return dataclasses.replace(self, source=f"{RULE}{backend}", why=why)

    def fingerprint(self) -> str:
        """Equal on all ranks that made the same choice for the same request."""
        text = repr((self.request, self.backend, self.platform, self.provider, self.lowerings))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def steps(self) -> list[str]:
        """The rewrites, outermost first, with what each does and costs."""
        return list(self.lowerings) if self.plan is None else self.plan.lines()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "backend": self.backend,
            "platform": self.platform,
            "provider": self.provider,
            "lowerings": list(self.lowerings),
            "steps": self.steps(),
            "source": self.source,
            "why": self.why,
            "planned": self.planned,
            "evidence": self.evidence,
            "others": list(self.others),
            "rejected": {k: list(v) for k, v in self.rejected.items()},
            "rewritable": {k: list(v) for k, v in self.rewritable.items()},
            "notes": list(self.notes),
            "inner": [one.to_dict() for one in self.inner],
            "request": {k: v for k, v in dataclasses.asdict(self.request).items() if v not in ("", (), None)},
        }

    def __str__(self) -> str:
        head = f"{self.id} ({self.provider}) by {self.source}: {self.why}"
        lines = [head + (" [planned]" if self.planned else "")]
        lines += [f"  via {step}" for step in self.steps()]
        lines += [f"  calls {one.request.family}: " + str(one).replace("\n", "\n  ") for one in self.inner]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  not {name}: {'; '.join(reasons)}" for name, reasons in self.rejected.items()]
        lines += [f"  but {name} via {'; via '.join(steps)}" for name, steps in self.rewritable.items()]
        return "\n".join(lines)
