"""The point where a task's run is, and the place of a layer there: found now, or when compiled code runs. No torch."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Mapping
from typing import Any

from ..contract import Place
from ..selection.overrides import AGAIN, Scope, restored

__all__ = ["POINTS", "Ahead", "At", "here"]

# Of a task, not of a thread: two that take turns in one thread have a run each.
POINTS: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("polyattn_points", default=())
"""Points that the task is inside of: objects whose `place` is that of the run there."""


class At:
    """`At` is where a run is, from the start of a `with` to its end. It may be entered again."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __enter__(self) -> None:
        POINTS.set((*POINTS.get(), self))

    def __exit__(self, *error: object) -> None:
        # A block may end in another context than it began in, where there is nothing to leave.
        points = POINTS.get()
        if points and points[-1] is self:
            POINTS.set(points[:-1])


class _Again(At):
    """Where a recomputation is: where its forward was, but for the run, which is told of each call once and may end."""

    def __init__(self, scope: Scope) -> None:
        points = POINTS.get()
        super().__init__(dataclasses.replace(points[-1].place, run=None) if points else Place())
        self._scope = restored(scope)

    def __enter__(self) -> None:
        self._scope.__enter__()
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._scope.__exit__(None, None, None)


AGAIN.append(_Again)


class Ahead:
    """`Ahead` stands for the run of a place that compiled code made: which one it is, is found when the code runs.

    Attributes:
        given: fields of the place that the layer said itself; they win over those of the run.
    """

    def __init__(self, given: tuple[str, ...]) -> None:
        self.given = given

    def now(self, place: Place) -> Place:
        """The place of a call that is made now. place: has this object for its run."""
        return here(place.layer, place.tensors, {name: getattr(place, name) for name in self.given})


def here(layer: Any, tensors: Mapping[str, Any], given: Mapping[str, Any]) -> Place:
    """The place of a layer where the run of this task is; outside of every run, what is given alone.

    Args:
        layer, tensors, given: as `polyattn.video.place`.

    Raises:
        InvalidInputError: a value that no call can have, or the run has ended.
    """
    points = POINTS.get()
    at = points[-1].place if points else Place()
    run = at.run
    if run is not None:
        layer = run.number(layer)
        # One dict for each layer: without a number there is nothing to tell layers apart by.
        kept = None if layer is None else run.kept(layer, given.get("branch", at.branch))
        given = {"kept": kept, **given}
    return dataclasses.replace(at, layer=layer, tensors=tensors, **given)
