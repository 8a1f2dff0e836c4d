"""Is what a plugin hands over for a request what the contract asks for? Asked once, before the first call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from . import contract
from .contract import Bound
from .errors import PluginError
from .records import AttentionRequest

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
_DECLARED = frozenset({"kv_parts"})
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
    try:
        taken = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in C, which shows no signature: the first call will tell
        return
    if any(one.kind is one.VAR_KEYWORD for one in taken):
        return
    by_name = {one.name for one in taken if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    asked = [one for one in inspect.signature(protocol.__call__).parameters.values() if one.kind is one.KEYWORD_ONLY]
    given = [one for one in asked if one.name not in _DECLARED or getattr(request, one.name)]
    if missing := [one for one in given if one.name not in by_name]:
        add = ", ".join(one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in missing)
        label = getattr(function, "__qualname__", type(function).__qualname__)
        raise PluginError(
            f"{what}, {label}, cannot be given {', '.join(one.name for one in missing)}: it takes every keyword of "
            f"polyattn.contract.{protocol.__name__}, also of what it does not declare. Add {add}; docs/hooks.md, "
            f"polyattn_load_forward, says what they are"
        )
