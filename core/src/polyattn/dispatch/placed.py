"""Calls of `polyattn.attention` with what few have: a place, which a method looks at where one is asked for by name;
chunks, slopes and segments, so that other calls need not look for them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from ..contract import Place
from ..contract.lengths import extent_of
from ..epoch import EPOCH
from ..errors import InvalidInputError
from ..selection import overrides
from ..selection.select import Selection
from .binding import asks_method, load, select_here
from .call_key import NOTHING, SITES_KEPT, Added, Six, Static, public, site_of
from .compile.symbolic import recorded_call
from .compile.trace import trace_dense
from .compile.trace_placed import trace_placed
from .dense import DenseSite, attention, dense_request

__all__ = ["asked", "asked_traced", "at", "explain"]


def at(
    tensors: Six,
    static: tuple[Any, ...],
    backend: str | None,
    scope: overrides.Scope | None,
    place: Any,
    added: Added = NOTHING,
) -> Any:
    """`polyattn.attention` at a place, or with what was added to its tensors.

    Args:
        static: the arguments of `Static`, in order. scope: of the overrides, None = the one in force here.
        place: None = none is given.

    Raises:
        InvalidInputError: `place` is no place, or contradicts the role of its layer; the rest as `polyattn.attention`.
    """
    if not isinstance(tensors[0], Tensor):
        optional = dict(zip(("attn_mask", "sinks", "out", "place"), (*tensors[3:], place), strict=True))
        optional |= public(added)
        node = recorded_call(attention, site_of(DenseSite, static, backend, scope), *tensors[:3], **optional)
        if node is not None:
            return node
    static = static if place is None else _with_role(static, place)
    ahead = None if place is None else getattr(place.run, "now", None)
    if not torch.compiler.is_compiling():
        if ahead is not None:  # compiled code made it, and gave it to a call that is not compiled
            return at(tensors, static, backend, scope, ahead(place), added)
        site = site_of(DenseSite, static, backend, scope)
        if place is not None and asked(backend, site._scope, EPOCH.value):
            return site._find(*tensors, place, added)
        return site._find(*tensors, None, added) if added else site(*tensors)
    inside = overrides.current_scope() if scope is None else scope
    if place is not None and asked_traced(backend, inside, EPOCH.token):
        # What a method does depends on the place.
        bound = Static(*static)
        if (
            (place.run is None or ahead is not None)
            and place.kept is tensors[5] is None
            and not (added or bound.return_lse)
        ):
            return trace_placed(tensors[:5], bound, backend, inside, place)
        from .compile.between_graphs import between_graphs

        return between_graphs(at, tensors, static, backend, inside, place, added)
    return trace_dense(tensors, Static(*static), backend, scope, added)


def _with_role(static: tuple[Any, ...], place: Any) -> tuple[Any, ...]:
    if not isinstance(place, Place):
        raise InvalidInputError(f"place is a {type(place).__name__}; a polyattn.video.Place is needed")
    bound = Static(*static)
    own = bound.role
    if own is not None and place.role is not None and own != place.role:
        raise InvalidInputError(f"the layer has role={own!r} and the place role={place.role!r}; leave one of them out")
    return bound._replace(role=place.role if own is None else own)


@functools.lru_cache(maxsize=SITES_KEPT)
def asked(backend: str | None, scope: overrides.Scope, epoch: int) -> bool:
    """Whether a method is asked for here; `epoch` changes with what decides the answer."""
    return asks_method(backend, scope)


def asked_traced(backend: str | None, scope: overrides.Scope, token: str) -> bool:
    """`asked` while dynamo traces: the answer is a constant of the graph."""
    return asks_method(backend, scope)


# As `torch.compiler.assume_constant_result`, without its import of dynamo, which costs as much as torch itself. `token`
# changes with what decides the answer.
asked_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def explain(
    tensors: Six,
    static: tuple[Any, ...],
    backend: str | None,
    scope: overrides.Scope | None,
    place: Any,
    added: Added = NOTHING,
) -> Selection:
    """Who serves a dense call; of a method also the calls that it makes. Arguments as `at`. Nothing is run.

    Raises:
        as `at`.
    """
    static = static if place is None else _with_role(static, place)
    site = site_of(DenseSite, static, backend, scope)
    request = dense_request(site.static, *tensors, added=added)
    if place is None or not asks_method(backend, site._scope):
        return select_here(request, backend, site._scope, extent_of(request)(*tensors[:2]), full=True)
    extent = extent_of(request)(*tensors[:2])
    selection = select_here(dataclasses.replace(request, place=True), backend, site._scope, extent, full=True)
    if not selection.request.place:
        return selection
    calls = getattr(load(selection).bound.forward, "calls", None)
    if calls is None:  # a function of a plugin's own, or one that is looked at (POLYATTN_VALIDATE)
        note = "which calls it makes is not known before it runs"
        return dataclasses.replace(selection, notes=(*selection.notes, note))
    return dataclasses.replace(selection, inner=calls(*tensors[:3], place))
