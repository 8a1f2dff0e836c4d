"""The plugin of Moore Threads GPUs: records only, which every machine reads; nothing of MATE is imported."""

from __future__ import annotations

from collections.abc import Iterable

from polyattn.contract import BackendInfo, hookimpl

from .records import BACKENDS

__all__ = ["BACKENDS", "polyattn_register_backends"]

POLYATTN_API_VERSION = 2


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """Every MUSA backend polyattn knows."""
    return BACKENDS
