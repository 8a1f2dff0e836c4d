"""This module remembers what an install put into a host, and takes it out again: whatever stood there before comes
back.

Hosts have registries that only add, and methods that must be wrapped. Others may change the same place later; what is
no longer ours is left to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from typing import Any

__all__ = ["Patches"]

_NOTHING = object()


@dataclasses.dataclass(frozen=True)
class _Patch:
    """A patch is one changed place: an attribute of `owner`, or an item of it where it is a mapping."""

    owner: Any
    name: str
    ours: Any
    before: Any
    item: bool

    def now(self) -> Any:
        if self.item:
            return self.owner.get(self.name, _NOTHING)
        return vars(self.owner).get(self.name, _NOTHING)

    def put(self, value: Any) -> None:
        if self.item and value is _NOTHING:
            del self.owner[self.name]
        elif self.item:
            self.owner[self.name] = value
        elif value is _NOTHING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Patches:
    """Patches are the places that one install has changed, in order."""

    def __init__(self) -> None:
        self._done: list[_Patch] = []

    def __bool__(self) -> bool:
        return bool(self._done)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class or module."""
        before = vars(owner).get(name, _NOTHING)
        self._put(_Patch(owner, name, value, before, item=False))

    def item(self, owner: MutableMapping[str, Any], name: str, value: Any) -> None:
        """Set an item of a registry."""
        self._put(_Patch(owner, name, value, owner.get(name, _NOTHING), item=True))

    def _put(self, patch: _Patch) -> None:
        patch.put(patch.ours)
        self._done.append(patch)

    def undo(self) -> None:
        """Bring back what stood there before, the last change first. A place that somebody has changed since is theirs
        and stays. A second call does nothing."""
        while self._done:
            patch = self._done.pop()
            if patch.now() is patch.ours:
                patch.put(patch.before)
