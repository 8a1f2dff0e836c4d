"""This module names the device and the versions that a measurement belongs to. Torch is imported when it is asked."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..registry.distributions import distribution_version
from .rows import Place

if TYPE_CHECKING:
    from torch import device

__all__ = ["cpu_name", "driver", "place_of"]

_DRIVERS = {"cuda": Path("/proc/driver/nvidia/version"), "rocm": Path("/sys/module/amdgpu/version")}
_ARM = {"CPU implementer": "implementer", "CPU part": "part", "CPU variant": "variant"}
_RELEASE = re.compile(r"\b\d+\.\d+(\.\d+)*\b")


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
    if where.type == "cpu":
        return cpu_name(), platform.machine()
    import torch

    if where.type == "cuda":
        about = torch.cuda.get_device_properties(where)
        return about.name, about.gcnArchName.split(":")[0] if torch.version.hip else f"sm{about.major}{about.minor}"
    module = torch.get_device_module(where)
    name = getattr(module, "get_device_name", None)
    return str(name(where)) if name is not None else where.type, ""


@functools.cache
def cpu_name() -> str:
    """The processor, as its vendor calls it."""
    info = Path("/proc/cpuinfo")
    return _model(info.read_text() if info.is_file() else "") or platform.processor() or platform.machine()


def _model(info: str) -> str:
    """Read the model of the CPU from /proc/cpuinfo. Arm's has numbers instead of a name."""
    told: dict[str, str] = {}
    for line in info.splitlines():
        name, _, said = line.partition(":")
        told.setdefault(name.strip(), said.strip())
    if "model name" in told:
        return told["model name"]
    numbers = [f"{what} {told[name]}" for name, what in _ARM.items() if name in told]
    return f"{platform.machine()} {', '.join(numbers)}" if numbers else ""


@functools.cache
def driver(platform: str) -> str:
    """Version of the kernel driver of platforms cuda and rocm; "" where the system does not tell."""
    file = _DRIVERS.get(platform)
    if file is None or not file.is_file():
        return ""
    found = _RELEASE.search(file.read_text())
    return found[0] if found else ""
