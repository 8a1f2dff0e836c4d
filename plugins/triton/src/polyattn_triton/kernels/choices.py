"""How a launch over a cache is cut: as it was measured on this machine (docs/tuning.md), else by a kernel's table."""

from __future__ import annotations

import functools
from typing import Protocol, TypeVar

import torch

from polyattn.epoch import EPOCH
from polyattn.tuning import Kernel, Key, kernel_config

__all__ = ["EPOCH", "architecture", "chosen"]


class _Config(Protocol):
    def _asdict(self) -> dict[str, int]: ...

    def _replace(self, **kwargs: int) -> _Config: ...


_C = TypeVar("_C", bound=_Config)


@functools.cache
def architecture(device: torch.device) -> str:
    """The class of devices that a table is for: hopper, blackwell, cuda (others of NVIDIA), other."""
    if device.type != "cuda" or torch.version.hip:
        return "other"
    return {9: "hopper", 10: "blackwell"}.get(torch.cuda.get_device_capability(device)[0], "cuda")


def chosen(kernel: Kernel, key: Key, default: _C, device: torch.device) -> _C:
    """`default` with the choices that were measured for this key on this device, if some were.

    Callers keep what they get; `EPOCH.value` is another number when the store has something else to say.
    """
    names = kernel.choices
    plain = {name: value for name, value in default._asdict().items() if name in names}
    found = kernel_config(kernel, key, plain, device)
    return default if found is plain else default._replace(**found)
