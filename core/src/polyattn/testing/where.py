"""This module finds where a backend is run, without importing torch: its platform and device, or why it is not run
here."""

from __future__ import annotations

import dataclasses

from ..contract import BackendInfo
from ..errors import BackendUnavailableError, did_you_mean
from ..registry.manager import get_manager
from ..selection.inspection import detect, list_backends

__all__ = ["AUTO", "Place", "place", "unknown_backend"]

AUTO = "auto"
"""Of the backend's platforms the one whose accelerator is here, else the CPU."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Describes where a backend is run.

    Attributes:
        info: the backend. device: for torch. missing: why it is not run here; empty when its device is.
        other: the device that is here is one that the backend is not for: no run on it could find it.
    """

    info: BackendInfo
    device: str
    missing: str = ""
    other: bool = False


def place(backend: str, device: str = AUTO) -> Place:
    """Find where to run a backend.

    Args:
        backend: its name, or name@platform. device: of torch, or `auto`.

    Raises:
        BackendUnavailableError: no backend has this name (on this device), it is planned, or what it needs is not
            installed. A device that is not here is no error, see `Place.missing`.
    """
    manager = get_manager()
    name, _, platform = backend.partition("@")
    found = [info for (known, _), info in manager.backends.items() if known == name]
    if not found:
        raise BackendUnavailableError(unknown_backend(name))
    kind = device.partition(":")[0]
    candidates = [
        info
        for info in found
        if platform in ("", info.platform) and kind in (AUTO, manager.platforms[info.platform].device_type)
    ]
    if not candidates:
        asked = f"{backend} on device {device}" if kind != AUTO else backend
        on = ", ".join(f"{info.id} ({manager.platforms[info.platform].device_type})" for info in found)
        raise BackendUnavailableError(f"there is no {asked}. {name} is registered as: {on}")
    built = [info for info in candidates if not info.planned]
    if not built:
        names = ", ".join(info.id for info in candidates)
        raise BackendUnavailableError(f"{names}: planned, its adapter is not part of this version: nothing can be run")
    # An accelerator before the CPU, and what is here before what is not.
    info = min(built, key=lambda info: (not detect(info.platform).present, info.platform == "cpu"))
    report = detect(info.platform)
    where = manager.platforms[info.platform].device_type if kind == AUTO else device
    if not report.present:
        others = [f"{i.platform} ({detect(i.platform).detail})" for i in built]
        return Place(info, where, f"no device of {name} is here: {'; '.join(others)}")
    status = next(s for s in list_backends(info.platform) if s.name == name)
    if status.status != "available":
        raise BackendUnavailableError(f"{info.id} is {status.status}: {'; '.join(status.reasons)}")
    return Place(info, where)


def unknown_backend(name: str) -> str:
    manager = get_manager()
    names = {known for known, _ in manager.backends}
    # An alias is of a backend on a platform: several may have the same.
    if meant := sorted({info.name for info in manager.backends.values() if name in {a.name for a in info.aliases}}):
        return f"{name} is another name of {', '.join(meant)}: conformance is that of {' or '.join(meant)}"
    broken = [f"{plugin.label}: {plugin.reason}" for plugin in manager.broken()]
    blame = f" These plugins could not be used and may be what you want: {'; '.join(broken)}." if broken else ""
    return f"no backend is named {name!r}.{did_you_mean(name, names)}{blame} `polyattn list --all` shows all"
