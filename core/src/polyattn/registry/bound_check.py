"""This module checks that what a plugin returns for a request fits the contract. Asked once, before the first call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..contract import API_VERSION, AttentionRequest, Bound
from ..contract.families import FAMILY_SPECS
from ..errors import PluginError
from . import version_1

__all__ = ["checked"]


def checked(bound: Any, request: AttentionRequest, who: str, version: int = API_VERSION) -> Bound:
    """`bound`, when its functions can be called as the contract says; one of version 1 is made one of version 2.

    Args:
        who: the plugin and its backend, for messages. version: of the contract, that the plugin speaks.

    Raises:
        PluginError: it is another thing, or a function lacks a keyword of its protocol.
    """
    if not isinstance(bound, Bound) or not callable(bound.forward):
        what = f"Bound({bound.forward!r})" if isinstance(bound, Bound) else type(bound).__name__
        raise PluginError(f"{who} returned {what}, a polyattn.contract.Bound of a function is needed")
    for name in ("forward", "backward"):
        protocol, function = getattr(FAMILY_SPECS[request.family], name), getattr(bound, name)
        if function is not None and protocol:
            _check_keywords(function, name, protocol, request, f"{who}: its {request.family} {name}", version)
    return version_1.as_version_2(bound) if version == 1 and request.family in version_1.FAMILIES else bound


def _check_keywords(
    function: Callable[..., Any], name: Any, protocol: str, request: AttentionRequest, what: str, version: int
) -> None:
    while isinstance(function, functools.partial):
        function = function.func
    # Of the code, not `inspect.signature`: this is part of the first call of every kind.
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARKEYWORDS:  # without code it is built in C: its call will tell
        return
    taken = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    on = [field for field in FAMILY_SPECS[request.family].conditional if getattr(request, field)]
    given = _given(request.family, name, version, tuple(on))
    missing = (
        {name: as_written for name, as_written in given.items() if name not in taken} if given.keys() - taken else {}
    )
    if missing:
        moved = ""
        if "tables" in taken and "page_table" in missing:
            moved = ". It has tables, which POLYATTN_API_VERSION = 2 in the plugin's module asks for"
        elif "tables" in missing and "page_table" in taken:
            moved = ". It has page_table: tables takes the place of these five keywords since version 2"
        raise PluginError(
            f"{what}, {getattr(function, '__qualname__', type(function).__qualname__)}, cannot be given "
            f"{', '.join(missing)}: it takes every keyword of polyattn.contract.{protocol}, also of what it "
            f"does not declare. Add {', '.join(missing.values())}; docs/hooks.md, polyattn_load_forward, says what "
            f"they are{moved}"
        )


@functools.cache
def _given(family: str, function: Any, version: int, on: tuple[str, ...]) -> Mapping[str, str]:
    """The keywords that a function is given, as a version has them -> how a signature writes them, with their defaults.
    on: fields of the request whose keyword is given only where they are on."""
    asked = {a.name: w for a, w in FAMILY_SPECS[family].taken(function) if not a.given_when or a.given_when in on}
    if version == 1 and asked.pop("tables", ""):
        asked = {**{name: name for name in version_1.TABLES}, **asked}
    return asked
