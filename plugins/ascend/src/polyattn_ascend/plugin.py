"""The plugin of Ascend NPUs: it announces backends, as data. Their limits are in `records/`, one file per operator."""

from __future__ import annotations

from collections.abc import Iterable

from polyattn.contract import BackendInfo, hookimpl

from .records import fusion, inference

__all__ = ["BACKENDS", "polyattn_register_backends"]

POLYATTN_API_VERSION = 2

BACKENDS: tuple[BackendInfo, ...] = (*fusion.BACKENDS, *inference.BACKENDS)


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """Every Ascend backend polyattn knows."""
    return BACKENDS
