"""A queue of things by their last use, in which a use costs nothing until the thing comes to the front."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

__all__ = ["ByAge"]


class _Used(Protocol):
    used: int


T = TypeVar("T", bound=_Used)


class ByAge(Generic[T]):
    """Things that have `used`, a number that no two share and that grows with each use: the least comes out first.

    Each call costs O(log n), amortised: a place in the queue is brought up to date only when it is the first.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, T]] = []
        self._there: set[T] = set()

    def __contains__(self, thing: T) -> bool:
        return thing in self._there

    def add(self, thing: T) -> None:
        """Put a thing in, once however often it is asked for."""
        if thing in self._there:
            return
        if len(self._heap) > 2 * len(self._there) + 64:  # of those that were discarded
            self._heap = [(one.used, one) for one in self._there]
            heapq.heapify(self._heap)
        self._there.add(thing)
        heapq.heappush(self._heap, (thing.used, thing))

    def discard(self, thing: T) -> None:
        """Take a thing out that is never put in again."""
        self._there.discard(thing)

    def pop(self) -> T | None:
        """Take the one out that was not used for longest; None: there is none."""
        while self._heap:
            used, thing = self._heap[0]
            if thing not in self._there:
                heapq.heappop(self._heap)
            elif used != thing.used:
                heapq.heapreplace(self._heap, (thing.used, thing))
            else:
                heapq.heappop(self._heap)
                self._there.remove(thing)
                return thing
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._there.clear()
