"""The rewrites of requests, made once for all the backends that may be reached by them. Pure, as planning is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ..contract import AttentionRequest
from ..contract.request import changed
from .base import KEPT, Lowering, Rewrite

__all__ = ["Stop", "Ways"]


class Stop:
    """A request in normal form on the way to a kernel, and what was made of it so far."""

    __slots__ = ("active", "kept", "made", "request")

    def __init__(self, request: AttentionRequest) -> None:
        self.request, self.active = request, [name for name, _ in request.active()]
        self.kept = [name for name in self.active if name in KEPT]
        self.made: dict[str, tuple[list[tuple[Rewrite, tuple[Stop, ...]]], Iterator[Rewrite]]] = {}


class Ways:
    """Keeps the rewrites of a request, and of what they lead to.

    Args:
        helper: what serves a helper's request, None where nothing does; its `str` names it. It is asked once for each.
    """

    def __init__(self, helper: Callable[[AttentionRequest], Any | None] = lambda request: None) -> None:
        self._helper = helper
        self._helped: dict[AttentionRequest, Any | None] = {}
        self._stops: dict[AttentionRequest, Stop] = {}

    def at(self, request: AttentionRequest) -> Stop:
        """The stop of a request in normal form."""
        found = self._stops.get(request)
        if found is None:
            found = self._stops[request] = Stop(request)
        return found

    def of(self, stop: Stop, lowering: Lowering) -> Iterator[tuple[Rewrite, tuple[Stop, ...]]]:
        """The rewrites that a lowering offers, with where each leads to; only as many are made as are asked for."""
        if lowering.name not in stop.made:
            stop.made[lowering.name] = ([], iter(lowering.rewrites(stop.request)))
        made, offered = stop.made[lowering.name]
        yield from made
        for rewrite in offered:
            inner = tuple(map(_by_itself, rewrite.inner))
            made.append((dataclasses.replace(rewrite, inner=inner), tuple(map(self.at, inner))))
            yield made[-1]

    def help(self, request: AttentionRequest) -> Any | None:
        """What serves a helper's request."""
        request = _by_itself(request)
        if request not in self._helped:
            self._helped[request] = self._helper(request)
        return self._helped[request]


def _by_itself(request: AttentionRequest) -> AttentionRequest:
    """Return the request in normal form. What is rewritten is no layer of the step that was planned, whose tables it
    does not read: where it is recorded, it is as a call by itself."""
    if request.graph_capture == "session":
        request = changed(request, graph_capture=True)
    return request.normalised()
