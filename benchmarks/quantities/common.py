"""The record that names a cost and says how it may grow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    """A cost that is measured at several sizes.

    `prepare(size)` builds the state once and returns the operation; the operation is run several times, leaves the
    state as large as it was, and returns how many single operations it did.
    """

    name: str
    size_is: str  # what the size counts: "held prefixes", "rows of the store"
    sizes: tuple[int, ...]  # three, a decade apart
    small: tuple[int, ...]  # the same for CI
    allowed: float  # the largest exponent of growth
    prepare: Callable[[int], Callable[[], int]]
