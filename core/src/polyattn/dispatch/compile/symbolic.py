"""`torch.fx.symbolic_trace`: a call on its stand-ins for tensors becomes one node of the graph, as one of torch's SDPA
does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.fx import Proxy

from ...contract import Place
from ...errors import InvalidInputError
from ...selection.overrides import Scope
from ..call_key import Static

__all__ = ["recorded", "recorded_call"]

_DEFAULTS = Static()._asdict()


def recorded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Proxy | None:
    """The node that calls `function`, or None where no argument is a stand-in."""
    given = next((one for one in (*args, *kwargs.values()) if isinstance(one, Proxy)), None)
    if given is None:
        return None
    made: Proxy = given.tracer.create_proxy("call_function", function, args, kwargs)
    return made


def recorded_call(function: Callable[..., Any], site: Any, *args: Any, **kwargs: Any) -> Proxy | None:
    """`recorded` of a call site: what it holds become arguments, a backend that its scope names too.

    Raises:
        InvalidInputError: the site belongs to a component, which is not an argument.
    """
    stated = {name: value for name, value in site.static._asdict().items() if value != _DEFAULTS[name]}
    stated = {name: value for name, value in stated.items() if value != "THD"}
    scope: Scope = site._scope
    role = stated.pop("role", None)  # of a layer; the call takes it with its place
    if role is not None:
        kwargs["place"] = _in_role(kwargs.get("place"), role)
    named = site._argument or scope[0]
    if named:
        stated["backend"] = named
    optional = {name: value for name, value in kwargs.items() if value is not None}
    node = recorded(function, *args, **stated, **optional)
    if node is not None and scope[1] and not named:
        raise InvalidInputError(
            f"a call inside component {scope[1]!r} is traced by torch.fx, whose graph cannot keep the component; trace "
            f"outside of it, or name a backend"
        )
    return node


def _in_role(place: Any, role: Any) -> Any:
    """A place with the role of its layer."""
    node = recorded(_in_role, place, role)
    if node is not None:
        return node
    return Place(role=role) if place is None else dataclasses.replace(place, role=role)
