"""Find the kernels that a plugin brings for what serving does on a device beside attention.

Core's own torch operators are the definition, and serve wherever nobody brings kernels. A plugin announces a class
(`polyattn_register_device_ops`); it is imported when a pool is made on such a device. Importing this imports no torch.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

from ...contract import DeviceOps, DeviceOpsInfo
from ...registry.distributions import distribution_version
from ...registry.manager import get_manager

__all__ = ["CORE", "device_ops"]

CORE = "polyattn"
"""Who writes where no package brings kernels."""


def device_ops(device_type: str) -> DeviceOps | None:
    """The kernels for a kind of device; None: core's operators serve. What cannot be imported is warned about."""
    here = (one for one in get_manager().device_ops if one.device_type == device_type)
    return _first(device_type, tuple(sorted(here, key=lambda one: (one.rank, one.target))))


@functools.cache
def _first(device_type: str, announced: tuple[DeviceOpsInfo, ...]) -> DeviceOps | None:
    """The first of what plugins announce that can be used."""
    for one in announced:
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
                stacklevel=4,
            )
            continue
        ops: DeviceOps = found
        return ops
    return None
