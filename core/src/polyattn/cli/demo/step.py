"""This module has what a step of the demo hands back."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from rich.console import RenderableType

__all__ = ["Step"]


@dataclasses.dataclass
class Step:
    """A step is one part of the demo, done.

    Attributes:
        title, note: its heading. verdict: pass, fail or not run. figure: the number behind the verdict, in words.
        parts: what is shown. data: the same, for JSON.
    """

    title: str
    note: str
    verdict: Literal["pass", "fail", "not run"]
    figure: str
    parts: tuple[RenderableType, ...] = ()
    data: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.title, "verdict": self.verdict, "figure": self.figure, **self.data}
