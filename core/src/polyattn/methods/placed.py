"""Calls of `polyattn.attention` that have a place: to a method where one is asked for by name, else as without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import overrides
from ..choose import Chosen, asks_method, choose, load
from ..compiled import trace_dense
from ..dispatch import DenseSite, attention, dense_key, dense_request
from ..epoch import EPOCH
from ..errors import InvalidInputError
from ..records import AttentionRequest, Place
from ..scalars import kinds
from ..selection import Selection
from ..signature import SIGNATURES_KEPT, SITES_KEPT, Static, no_autocast, runner
from ..symbolic import recorded_call
from ..traced_facts import counted
from ..validate import has_shapes_only

__all__ = ["at", "explain"]

_Run = tuple[Callable[..., Any], bool]
"""What a signature calls, and whether that is given the place."""


class _Site:
    """The calls of one set of static arguments. A place is in no signature: it is an argument of the method."""

    def __init__(self, static: tuple[Any, ...], backend: str | None, scope: overrides.Scope) -> None:
        self.site = DenseSite(Static(*static), backend, scope)
        self.backend, self.scope = backend, scope
        self._epoch, self._method = -1, False
        self._runs: dict[Any, _Run] = {}

    def __call__(self, query: Any, key: Any, value: Any, mask: Any, sinks: Any, out: Any, place: Place) -> Any:
        if self._epoch != EPOCH.value:
            self._runs, self._method, self._epoch = {}, asks_method(self.backend, self.scope), EPOCH.value
        if not self._method:
            return self.site(query, key, value, mask, sinks, out)
        run, placed = self._find(query, key, value, mask, sinks, out)
        given = {"place": place} if placed else {}
        return run(query, key, value, attn_mask=mask, sinks=sinks, out=out, **given)

    def _find(self, query: Any, key: Any, value: Any, mask: Any, sinks: Any, out: Any) -> _Run:
        if isinstance(query, Tensor) and (counted() or has_shapes_only(query)):
            return self._resolve(query, key, value, mask, sinks, out)  # no address and no guard that would hold
        try:
            signature = dense_key(query, key, value, mask, sinks, out, self.site.static.layout == "BSHD")
        except (AttributeError, RuntimeError, TypeError, ValueError) as exc:
            self.request(query, key, value, mask, sinks, out)  # says what is wrong
            raise InvalidInputError(f"the arguments of attention cannot be read: {exc}; pass 4-D tensors") from exc
        if signature not in self._runs:
            if len(self._runs) >= SIGNATURES_KEPT:
                self._runs.clear()
            self._runs[signature] = self._resolve(query, key, value, mask, sinks, out)
        return self._runs[signature]

    def _resolve(self, query: Tensor, key: Any, value: Any, mask: Any, sinks: Any, out: Any) -> _Run:
        chosen: Chosen = choose(self.request(query, key, value, mask, sinks, out), self.backend, self.scope)
        static = self.site.static
        run = runner(chosen, static.return_lse, not no_autocast(query), 2 if static.layout == "BSHD" else 1)

        def call(*tensors: Any, **given: Any) -> Any:
            return chosen.ranged("attention", run)(*tensors, **given)

        return call, chosen.request.place

    def request(self, query: Any, key: Any, value: Any, mask: Any, sinks: Any, out: Any) -> AttentionRequest:
        """What the call asks of a method."""
        return dataclasses.replace(dense_request(self.site.static, query, key, value, mask, sinks, out), place=True)


_sites: dict[Any, _Site] = {}


def _site(static: tuple[Any, ...], backend: str | None, scope: overrides.Scope | None) -> _Site:
    scope = overrides.SCOPE.get() if scope is None else scope
    try:
        name = (static, kinds(static), backend, scope)
        found = _sites.get(name)
    except TypeError:  # an unhashable argument, such as a window as a list
        return _Site(static, backend, scope)
    if found is None:
        if len(_sites) >= SITES_KEPT:
            _sites.clear()
        found = _sites[name] = _Site(static, backend, scope)
    return found


def at(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    sinks: Any,
    out: Any,
    static: tuple[Any, ...],
    backend: str | None,
    scope: overrides.Scope | None,
    place: Any,
) -> Any:
    """`polyattn.attention` at a place.

    Args:
        static: the arguments of `Static`, in order. scope: of the overrides, None = the one in force here.

    Raises:
        InvalidInputError: `place` is no place, or contradicts the role of its layer; the rest as `polyattn.attention`.
    """
    if not isinstance(query, Tensor):
        optional = {"attn_mask": mask, "sinks": sinks, "out": out, "place": place}
        node = recorded_call(attention, _site(static, backend, scope).site, query, key, value, **optional)
        if node is not None:
            return node
    static = _with_role(static, place)
    if not torch.compiler.is_dynamo_compiling():
        return _site(static, backend, scope)(query, key, value, mask, sinks, out, place)
    inside = overrides.current_scope() if scope is None else scope
    if _asks_method(backend, inside, EPOCH.token):
        # What a method does depends on the place: the graph ends before the call and goes on after it.
        from .between_graphs import between_graphs

        return between_graphs(query, key, value, mask, sinks, out, static, backend, inside, place)
    return trace_dense(query, key, value, mask, sinks, out, static, backend, scope)


def _with_role(static: tuple[Any, ...], place: Any) -> tuple[Any, ...]:
    if not isinstance(place, Place):
        raise InvalidInputError(f"place is a {type(place).__name__}; a polyattn.video.Place is needed")
    *rest, own = static
    if own is not None and place.role is not None and own != place.role:
        raise InvalidInputError(f"the layer has role={own!r} and the place role={place.role!r}; leave one of them out")
    return (*rest, place.role if own is None else own)


def _asks_method(backend: str | None, scope: overrides.Scope, token: str) -> bool:
    return asks_method(backend, scope)


# As `torch.compiler.assume_constant_result`, without its import of dynamo, which costs as much as torch itself. `token`
# changes with what decides the answer.
_asks_method._dynamo_marked_constant = True  # type: ignore[attr-defined]


def explain(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    sinks: Any,
    out: Any,
    static: tuple[Any, ...],
    backend: str | None,
    scope: overrides.Scope | None,
    place: Any,
) -> Selection:
    """Who serves a call at a place; of a method also the calls that it makes. Arguments as `at`. Nothing is run.

    Raises:
        as `at`.
    """
    site = _site(_with_role(static, place), backend, scope)
    if not asks_method(backend, site.scope):
        return site.site.__polyattn_explain__(query, key, value, mask, sinks, out)
    from ..inspection import explain as of_request

    request = site.request(query, key, value, mask, sinks, out)
    with overrides.restored(site.scope):
        selection = of_request(request, backend=backend)
    if not selection.request.place:
        return selection
    attend: Any = load(selection).bound.forward
    return dataclasses.replace(selection, inner=attend.calls(query, key, value, place))
