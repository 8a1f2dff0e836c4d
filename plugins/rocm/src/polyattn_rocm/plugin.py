"""The plugin of AMD GPUs: it announces backends, as data. Their limits are in `records/`."""

from __future__ import annotations

from collections.abc import Iterable

from polyattn.contract import BackendInfo, hookimpl

from .records import dense, serving

__all__ = ["BACKENDS", "polyattn_register_backends"]

POLYATTN_API_VERSION = 2

BACKENDS: tuple[BackendInfo, ...] = (*dense.BACKENDS, *serving.BACKENDS)


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """Every ROCm backend polyattn knows."""
    return BACKENDS
