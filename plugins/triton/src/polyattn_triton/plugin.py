"""The plugin of the portable kernels: it announces backends, as data. Their limits are in `records/`."""

from __future__ import annotations

from collections.abc import Iterable

from polyattn.contract import BackendInfo, DeviceOpsInfo, Kernel, hookimpl

from .records import methods, softmax, tuned

__all__ = [
    "BACKENDS",
    "polyattn_register_backends",
    "polyattn_register_device_ops",
    "polyattn_register_tunables",
]

POLYATTN_API_VERSION = 2

BACKENDS: tuple[BackendInfo, ...] = (*softmax.BACKENDS, *methods.BACKENDS)


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """The `triton` backend of every platform, and the methods that are not listed by polyattn-cuda."""
    return BACKENDS


@hookimpl
def polyattn_register_tunables() -> Iterable[Kernel]:
    """The kernels whose choices can be measured."""
    return tuned.KERNELS


@hookimpl
def polyattn_register_device_ops() -> Iterable[DeviceOpsInfo]:
    """Kernels that write caches and the tables of steps, and that move tokens in blocks."""
    return (
        DeviceOpsInfo("cuda", "polyattn_triton.device_ops:DeviceOps", requires=("triton",)),
        DeviceOpsInfo("cuda", "polyattn_triton.device_ops:BlockOps", requires=("triton",), area="methods"),
    )
