"""Aliases that mean nothing, because a backend has the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..contract import BackendInfo

__all__ = ["lost_aliases"]


def lost_aliases(backends: Iterable[BackendInfo], owner: Callable[[BackendInfo], str]) -> list[str]:
    """A sentence for each alias that means nothing, because a backend of the same platform has it as its name, which
    `resolve` lets no alias take over.

    Args:
        owner: the name of the plugin that registered a backend.
    """
    named = {(info.name, info.platform): info for info in backends}
    found = []
    for info, alias in [(one, alias) for one in named.values() for alias in one.aliases]:
        other = named.get((alias.name, info.platform), info)
        if other is info:
            continue
        who = f"plugin {owner(info)}: the alias {alias.name!r} of {info.id} means nothing, because {other.id}"
        if owner(other) != owner(info):
            found.append(f"{who} of plugin {owner(other)} has it as its name. Rename the alias")
        elif not alias.families:
            found.append(f"{who} has it as its name in every family. Give the alias its families, or rename it")
    return found
