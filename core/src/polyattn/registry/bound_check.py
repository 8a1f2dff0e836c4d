"""Is what a plugin hands over for a request what the contract asks for? Asked once, before the first call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .. import contract
from ..contract import AttentionRequest, Bound
from ..errors import PluginError
from . import version_1

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


def checked(bound: Any, request: AttentionRequest, who: str, version: int = contract.API_VERSION) -> Bound:
    """`bound`, when its functions can be called as the contract says; one of version 1 is made one of version 2.

    Args:
        who: the plugin and its backend, for messages. version: of the contract, that the plugin speaks.

    Raises:
        PluginError: it is another thing, or a function lacks a keyword of its protocol.
    """
    if not isinstance(bound, Bound) or not callable(bound.forward):
        what = f"Bound({bound.forward!r})" if isinstance(bound, Bound) else type(bound).__name__
        raise PluginError(f"{who} returned {what}, a polyattn.contract.Bound of a function is needed")
    for name, function, protocols in (("forward", bound.forward, _FORWARD), ("backward", bound.backward, _BACKWARD)):
        if function is not None and request.family in protocols:
            _check_keywords(
                function, protocols[request.family], request, f"{who}: its {request.family} {name}", version
            )
    return version_1.as_version_2(bound) if version == 1 and request.family in version_1.FAMILIES else bound


def _check_keywords(
    function: Callable[..., Any], protocol: Any, request: AttentionRequest, what: str, version: int
) -> None:
    while isinstance(function, functools.partial):
        function = function.func
    # Of the code, not `inspect.signature`: this is part of the first call of every kind.
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARKEYWORDS:  # without code it is built in C: its call will tell
        return
    taken = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    keywords = _keywords(protocol, version)
    missing = [name for name in keywords if name not in taken]
    if missing := [name for name in missing if name not in _DECLARED or getattr(request, name)]:
        add = ", ".join(keywords[name] for name in missing)
        moved = ""
        if "tables" in taken and "page_table" in missing:
            moved = ". It has tables, which POLYATTN_API_VERSION = 2 in the plugin's module asks for"
        elif "tables" in missing and "page_table" in taken:
            moved = ". It has page_table: tables takes the place of these five keywords since version 2"
        raise PluginError(
            f"{what}, {getattr(function, '__qualname__', type(function).__qualname__)}, cannot be given "
            f"{', '.join(missing)}: it takes every keyword of polyattn.contract.{protocol.__name__}, also of what it "
            f"does not declare. Add {add}; docs/hooks.md, polyattn_load_forward, says what they are{moved}"
        )


@functools.cache
def _keywords(protocol: Any, version: int) -> Mapping[str, str]:
    """The keywords of a protocol as a version has them -> how a signature writes them, with their defaults."""
    asked = inspect.signature(protocol.__call__).parameters.values()
    own = [one for one in asked if one.kind is one.KEYWORD_ONLY]
    found = {one.name: one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in own}
    if version == 1 and found.pop("tables", ""):
        found = {**{name: name for name in version_1.TABLES}, **found}
    return found
