"""How a launch over a cache is cut: as it was measured on this machine (docs/tuning.md), else by a kernel's table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from polyattn.adapters import EPOCH, kernel_config
from polyattn.contract import Kernel, Key
from polyattn_triton.kernels.room import Room, accepted, fitting, refused, shared_memory

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


def chosen(
    kernel: Kernel, key: Key, default: _C, device: torch.device, rooms: Sequence[Room], extra: Any = None,
    within: Callable[[_C], _C] = lambda config: config,
) -> _C:  # fmt: skip
    """`default` with the choices that were measured for this key on this device, if some were and they fit there; else
    `default`, or a smaller one where that does not fit.

    Callers keep what they get; `EPOCH.value` is another number when the store has something else to say, or a launch
    refused what it was given.

    Args:
        rooms: what its launches need. extra: what that depends on, besides the key.
        within: what becomes of a configuration that is too small or too large for the call; no shrinking goes below.

    Raises:
        UnsupportedRequestError: launches refused all there is, down to the smallest.
    """
    names = kernel.choices
    plain = {name: value for name, value in default._asdict().items() if name in names}
    found = kernel_config(kernel, key, plain, device)
    limit, where = shared_memory(device), architecture(device)
    if found is not plain:
        tuned = within(default._replace(**found))
        if fitting(tuned, rooms, where, limit) == tuned and tuned not in refused(kernel, key, extra, device):
            return tuned
    return accepted(fitting(within(default), rooms, where, limit), rooms, kernel, key, extra, device)
