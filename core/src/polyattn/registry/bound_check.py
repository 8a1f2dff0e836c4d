"""Is what a plugin hands over for a request what the contract asks for? Asked once, before the first call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .. import contract
from ..contract import AttentionRequest, Bound
from ..errors import PluginError

__all__ = ["checked"]

_FORWARD: dict[str, Any] = {
    "dense": contract.DenseForward,
    "varlen": contract.VarlenForward,
    "paged": contract.PagedForward,
    "mla": contract.MLAForward,
    "block_sparse": contract.BlockSparseForward,
    "linear": contract.LinearForward,
}
_BACKWARD: dict[str, Any] = {"dense": contract.DenseBackward, "varlen": contract.VarlenBackward}
_DECLARED = frozenset({"kv_parts", "place"})
"""Keywords that are given only where the request's field of that name is not off: packages from before them go on."""


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
    for name, function, protocols in (("forward", bound.forward, _FORWARD), ("backward", bound.backward, _BACKWARD)):
        if function is not None and request.family in protocols:
            _check_keywords(function, protocols[request.family], request, f"{who}: its {request.family} {name}")
    return bound


def _check_keywords(function: Callable[..., Any], protocol: Any, request: AttentionRequest, what: str) -> None:
    while isinstance(function, functools.partial):
        function = function.func
    # Of the code, not `inspect.signature`: this is part of the first call of every kind.
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARKEYWORDS:  # without code it is built in C: its call will tell
        return
    taken = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    missing = [name for name in _keywords(protocol) if name not in taken]
    if missing := [name for name in missing if name not in _DECLARED or getattr(request, name)]:
        add = ", ".join(_keywords(protocol)[name] for name in missing)
        raise PluginError(
            f"{what}, {getattr(function, '__qualname__', type(function).__qualname__)}, cannot be given "
            f"{', '.join(missing)}: it takes every keyword of polyattn.contract.{protocol.__name__}, also of what it "
            f"does not declare. Add {add}; docs/hooks.md, polyattn_load_forward, says what they are"
        )


@functools.cache
def _keywords(protocol: Any) -> Mapping[str, str]:
    """The keywords of a protocol -> as a signature has them, with their defaults."""
    asked = inspect.signature(protocol.__call__).parameters.values()
    own = [one for one in asked if one.kind is one.KEYWORD_ONLY]
    return {one.name: one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in own}
