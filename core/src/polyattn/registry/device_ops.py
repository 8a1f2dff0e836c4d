"""Find the kernels that a plugin brings for what serving and methods do on a device beside attention.

Core's own torch operators are the definition, and serve wherever nobody brings kernels. A plugin announces a class
(`polyattn_register_device_ops`); it is imported when somebody on such a device asks. Importing this imports no torch.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any, cast

from ..contract import BlockOps, DeviceOps, DeviceOpsInfo
from .distributions import distribution_version
from .manager import get_manager

__all__ = ["CORE", "block_ops", "device_ops"]

CORE = "polyattn"
"""Who writes where no package brings kernels."""


def device_ops(device_type: str) -> DeviceOps | None:
    """The kernels of serving for a kind of device; None: core's operators serve. Failed imports are warned about."""
    return cast("DeviceOps | None", _best(device_type, "serving"))


def block_ops(device_type: str) -> BlockOps | None:
    """The same for methods that move tokens in blocks."""
    return cast("BlockOps | None", _best(device_type, "methods"))


def _best(device_type: str, area: str) -> Any:
    here = (one for one in get_manager().device_ops if (one.device_type, one.area) == (device_type, area))
    return _first(device_type, tuple(sorted(here, key=lambda one: (one.rank, one.target))))


@functools.cache
def _first(device_type: str, announced: tuple[DeviceOpsInfo, ...]) -> Any:
    """The first of what plugins announce that can be used."""
    for one in announced:
        if any(distribution_version(name) is None for name in one.requires):
            continue
        module, _, name = one.target.partition(":")
        try:
            return getattr(importlib.import_module(module), name)()
        except Exception as exc:  # noqa: BLE001 - a stranger's module may raise anything; core serves instead, and says so
            warnings.warn(
                f"{one.target}: its kernels for {one.area} on {device_type} cannot be used ({type(exc).__name__}: {exc}"
                f"); polyattn's own operators serve, which are slower",
                RuntimeWarning,
                stacklevel=5,
            )
    return None
