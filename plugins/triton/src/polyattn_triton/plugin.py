"""The plugin of the portable kernels: it announces backends, as data. Their limits are in `records/`."""

from __future__ import annotations

from collections.abc import Iterable

from polyattn.hookspecs import hookimpl
from polyattn.records import BackendInfo
from polyattn.serving.device_ops import register_device_ops

from .records import methods, softmax

__all__ = ["BACKENDS", "polyattn_register_backends"]

POLYATTN_API_VERSION = 1

BACKENDS: tuple[BackendInfo, ...] = (*softmax.BACKENDS, *methods.BACKENDS)

register_device_ops("cuda", "polyattn_triton.device_ops:DeviceOps", requires=("triton",))


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """The `triton` backend of every platform, and the methods that are not listed by polyattn-cuda."""
    return BACKENDS
