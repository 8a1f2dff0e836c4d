"""The table of a call site: which bound kernel serves a signature."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from ..epoch import EPOCH

__all__ = ["SIGNATURES_KEPT", "BoundTable", "Recent"]

SIGNATURES_KEPT = 40_960
"""The most signatures of a site, of 4 KB each."""

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


class Recent(dict[_K, _T]):
    """A dict of the `most` keys used last, or of at least half of them.

    Keys are in two generations. `get` looks at the young one alone and writes nothing: a hit costs what it costs in any
    dict. What is not there is asked of `recall`, which makes an old key young again. A full young generation is the old
    one, and what is in the old one until then has not been asked for since `most` / 2 other keys were.
    """

    __slots__ = ("_half", "_old")

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._old: dict[_K, _T] = {}

    def recall(self, key: _K) -> _T | None:
        """The value of a key that is not young, None where it is not known."""
        found = self._old.pop(key, None)
        return None if found is None else self.keep(key, found)

    def keep(self, key: _K, value: _T) -> _T:
        """Keep a value, and return it."""
        if len(self) >= self._half:
            self._old = dict(self)
            self.clear()
        self[key] = value
        return value


class BoundTable(Generic[_T]):
    """Entries by signature. A change of plugins, configuration or measurements (the epoch) empties it."""

    __slots__ = ("_entries", "_epoch")

    def __init__(self) -> None:
        self._entries: Recent[Hashable, _T] = Recent(SIGNATURES_KEPT)
        self._epoch = -1

    def get(self, signature: Hashable) -> _T | None:
        """The entry of a signature, if it is still good."""
        if self._epoch != EPOCH.value:
            self._entries, self._epoch = Recent(SIGNATURES_KEPT), EPOCH.value
        return self._entries.get(signature) or self._entries.recall(signature)

    def put(self, signature: Hashable, entry: _T) -> _T:
        """Keep an entry, and return it."""
        return self._entries.keep(signature, entry)
