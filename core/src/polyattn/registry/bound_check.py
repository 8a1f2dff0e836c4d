"""Is what a plugin hands over for a request what the contract asks for? Asked once, before the first call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..contract import AttentionRequest, Bound
from ..contract.families import FAMILY_SPECS
from ..errors import PluginError

__all__ = ["checked"]


def checked(bound: Any, request: AttentionRequest, who: str) -> Bound:
    """`bound`, when it is one whose functions can be called as the contract says.

    Args:
        who: the plugin and its backend, for messages.

    Raises:
        PluginError: it is another thing, or a function lacks a keyword of its protocol.
    """
    if not isinstance(bound, Bound) or not callable(bound.forward):
        what = f"Bound({bound.forward!r})" if isinstance(bound, Bound) else type(bound).__name__
        raise PluginError(f"{who} returned {what}, a polyattn.contract.Bound of a function is needed")
    for name in ("forward", "backward"):
        protocol, function = getattr(FAMILY_SPECS[request.family], name), getattr(bound, name)
        if function is not None and protocol:
            _check_keywords(function, name, protocol, request, f"{who}: its {request.family} {name}")
    return bound


def _check_keywords(
    function: Callable[..., Any], name: Any, protocol: str, request: AttentionRequest, what: str
) -> None:
    while isinstance(function, functools.partial):
        function = function.func
    # Of the code, not `inspect.signature`: this is part of the first call of every kind.
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARKEYWORDS:  # without code it is built in C: its call will tell
        return
    taken = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    missing = {
        one.name: as_written
        for one, as_written in FAMILY_SPECS[request.family].taken(name)
        if one.name not in taken and (not one.given_when or getattr(request, one.given_when))
    }
    if missing:
        raise PluginError(
            f"{what}, {getattr(function, '__qualname__', type(function).__qualname__)}, cannot be given "
            f"{', '.join(missing)}: it takes every keyword of polyattn.contract.{protocol}, also of what it "
            f"does not declare. Add {', '.join(missing.values())}; docs/hooks.md, polyattn_load_forward, says what "
            "they are"
        )
