"""The plugin of Intel hardware: it announces backends, as data. Their limits are in `records/`."""

from __future__ import annotations

from collections.abc import Iterable

from polyattn.contract import BackendInfo, hookimpl

from .records import cpu, fa, serving

__all__ = ["BACKENDS", "polyattn_register_backends"]

POLYATTN_API_VERSION = 2

BACKENDS: tuple[BackendInfo, ...] = (*fa.BACKENDS, *serving.BACKENDS, *cpu.BACKENDS)


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """Every backend polyattn knows on Intel GPUs and CPUs."""
    return BACKENDS
