"""The table of a call site: which bound kernel serves a signature."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from ..epoch import EPOCH

__all__ = ["SIGNATURES_KEPT", "BoundTable"]

SIGNATURES_KEPT = 4096

_T = TypeVar("_T")


class BoundTable(Generic[_T]):
    """Entries by signature. A change of plugins, configuration or measurements (the epoch) empties it."""

    __slots__ = ("_entries", "_epoch")

    def __init__(self) -> None:
        self._entries: dict[Hashable, _T] = {}
        self._epoch = -1

    def get(self, signature: Hashable) -> _T | None:
        """The entry of a signature, if it is still good."""
        if self._epoch != EPOCH.value:
            self._entries, self._epoch = {}, EPOCH.value
        return self._entries.get(signature)

    def put(self, signature: Hashable, entry: _T) -> _T:
        """Keep an entry, and return it."""
        if len(self._entries) >= SIGNATURES_KEPT:
            self._entries.clear()
        self._entries[signature] = entry
        return entry
