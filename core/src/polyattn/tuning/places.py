"""Which device this is, and in which versions, as measurements are filed. Torch is imported when it is asked."""

from __future__ import annotations

import functools
import platform
from typing import TYPE_CHECKING

from ..distributions import distribution_version
from .rows import Place

if TYPE_CHECKING:
    from torch import device

__all__ = ["place_of"]


@functools.cache
def place_of(where: device, versions: tuple[str, ...] = (), revision: int = 1) -> Place:
    """The place of a device.

    Args:
        where: the device. versions: distributions that matter besides torch; those that are not installed are "".
        revision: `Kernel.revision`; 1 is not written down.
    """
    name, arch = _described(where)
    found = {distribution: distribution_version(distribution) or "" for distribution in ("torch", *versions)}
    if revision != 1:
        found["revision"] = str(revision)
    return Place(name, arch, tuple(sorted(found.items())))


def _described(where: device) -> tuple[str, str]:
    import torch

    if where.type == "cuda":
        about = torch.cuda.get_device_properties(where)
        return about.name, about.gcnArchName.split(":")[0] if torch.version.hip else f"sm{about.major}{about.minor}"
    if where.type == "cpu":
        return platform.processor() or platform.machine(), platform.machine()
    module = torch.get_device_module(where)
    name = getattr(module, "get_device_name", None)
    return str(name(where)) if name is not None else where.type, ""
