"""Kernels that can be tuned: what their choices may be, and what tells one measurement from another."""

from __future__ import annotations

from collections.abc import Mapping

from ..contract import Choices, Kernel, Key
from ..registry.manager import get_manager

__all__ = ["Choices", "Kernel", "Key", "bucket", "fine_bucket", "registered_kernels"]


def bucket(length: int) -> int:
    """A length rounded up to a power of two; 0 stays. Requests whose lengths share buckets share a measurement."""
    return 1 << (length - 1).bit_length() if length > 0 else 0


def fine_bucket(length: int) -> int:
    """A length rounded up to one of four steps between powers of two; 0 stays. Requests whose lengths share these share
    a prediction: within a `bucket` of each length, work may differ by a factor of 8, and with it who is fast."""
    step = 1 << max(length.bit_length() - 3, 0)
    return -(-length // step) * step


def registered_kernels() -> Mapping[str, Kernel]:
    """The kernels that plugins announce (`polyattn_register_tunables`), by name."""
    return get_manager().kernels
