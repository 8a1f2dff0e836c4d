"""Where the kernels run: compiled on a device, or under Triton's interpreter where TRITON_INTERPRET asks for it.

Every module with kernels imports this one before Triton: it refuses a process in which none could be declared.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

from polyattn.contract import BackendUnavailableError

from . import interpreter

__all__ = ["INTERPRETED", "check_device", "device_of", "on_its_device", "processors"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _interpreted() -> bool:
    if amiss := interpreter.at_odds():
        raise BackendUnavailableError(f"Triton cannot be used in this process: {'; '.join(amiss)}")
    return interpreter.asked()


INTERPRETED = _interpreted()
"""True: kernels are interpreted, on tensors of any device. False: they are compiled, for tensors of an accelerator."""


def check_device(device: torch.device) -> None:
    """Refuse CPU tensors in a process that compiles its kernels.

    Raises:
        BackendUnavailableError: they would have to be interpreted.
    """
    if device.type == "cpu" and not INTERPRETED:
        raise BackendUnavailableError(
            f"this process compiles its Triton kernels, which CPU tensors cannot be given to: {interpreter.START} "
            "to interpret them, or choose another backend for the CPU (`polyattn list`)"
        )


_HERE = contextlib.nullcontext()


def device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """To launch in: Triton launches on the current device, which need not be that of the tensors."""
    device = tensor.device
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _HERE
    return torch.accelerator.device_index(device.index)


def on_its_device(launch: Callable[Concatenate[torch.Tensor, _P], _R]) -> Callable[Concatenate[torch.Tensor, _P], _R]:
    """Decorates a function that launches kernels: it runs with the device of its first argument as the current one."""

    @functools.wraps(launch)
    def there(tensor: torch.Tensor, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with device_of(tensor):
            return launch(tensor, *args, **kwargs)

    return there


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors (compute units) of a device; 8 for the interpreter, so that it meets several programs."""
    if INTERPRETED or device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
