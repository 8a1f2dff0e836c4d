"""Kernels that can be tuned: what their choices may be, and what tells one measurement from another."""

from __future__ import annotations

from collections.abc import Mapping

from ..contract import Choices, Kernel, Key
from ..registry.manager import get_manager

__all__ = ["Choices", "Kernel", "Key", "bucket", "registered_kernels"]


def bucket(length: int) -> int:
    """A length rounded up to a power of two; 0 stays. Requests whose lengths share buckets share a measurement."""
    return 1 << (length - 1).bit_length() if length > 0 else 0


def registered_kernels() -> Mapping[str, Kernel]:
    """The kernels that plugins announce (`polyattn_register_tunables`), by name."""
    return get_manager().kernels
