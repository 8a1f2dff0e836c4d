"""What serving does on a device beside attention, by kernels that a package brings: today, writing rows of a cache.

Core's own torch operators are the definition, and serve wherever nobody brings kernels. A package registers a class
where its records are made; it is imported when a pool is made on such a device. Importing this imports no torch.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..distributions import distribution_version
from ..plugins import get_manager

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .pool import LayerCache

__all__ = ["DeviceOps", "device_ops", "register_device_ops"]


class DeviceOps(Protocol):
    """Made once for a process, without arguments. Nothing in it waits for the device; all of it may be recorded."""

    name: str
    """For people: who writes."""

    def writes(self, cache: LayerCache, dtype: torch.dtype) -> bool:
        """Whether `write` takes rows of `dtype` for such a cache. Else core writes them."""

    def write(self, cache: LayerCache, slots: Tensor, key: Tensor, value: Tensor | None, *, rows: bool) -> None:
        """Store new rows bit for bit as `KVPool.write` of core does.

        Args:
            cache: of a layer. slots: int64 [T], page * page_size + place; tokens of padding share slots.
            key, value: [T, H_kv, D], [T, H_kv, D_v], any strides; of a latent layer rows [T, D_c + D_r] and None.
            rows: False where scales belong to tokens: only those are made and stored.
        """


class _Registered(NamedTuple):
    rank: int
    target: str
    requires: tuple[str, ...]


_registered: dict[str, list[_Registered]] = {}


def register_device_ops(device_type: str, target: str, *, requires: tuple[str, ...] = (), rank: int = 100) -> None:
    """Bring kernels for a kind of device.

    Args:
        device_type: of torch: cuda (ROCm too), xpu, ...
        target: "package.module:Class" of a `DeviceOps`.
        requires: distributions without which it is not imported. rank: the lowest of those that can serve does.
    """
    known = _registered.setdefault(device_type, [])
    if all(one.target != target for one in known):
        known.append(_Registered(rank, target, requires))
        known.sort()
    device_ops.cache_clear()


@functools.cache
def device_ops(device_type: str) -> DeviceOps | None:
    """The kernels for a kind of device; None: core's operators serve. What cannot be imported is warned about."""
    get_manager()  # plugins register when they are loaded
    for one in _registered.get(device_type, ()):
        if any(distribution_version(name) is None for name in one.requires):
            continue
        module, _, name = one.target.partition(":")
        try:
            found: Any = getattr(importlib.import_module(module), name)()
        except Exception as exc:  # noqa: BLE001 - a stranger's module may raise anything; core serves instead, and says so
            warnings.warn(
                f"{one.target}: its kernels for serving on {device_type} cannot be used ({type(exc).__name__}: {exc}); "
                f"polyattn's own operators write the caches, which is slow where these are quantised",
                RuntimeWarning,
                stacklevel=3,
            )
            continue
        ops: DeviceOps = found
        return ops
    return None
