"""Where the kernels run: compiled on a device, or under Triton's interpreter on a machine that has none.

Triton decides at import, once for a process: this module sets its switch first, and every module with kernels imports
this one before Triton.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys

import torch

from polyattn.errors import BackendUnavailableError

__all__ = ["INTERPRETED", "check_device", "device_of", "processors"]

_SWITCH = "TRITON_INTERPRET"


def _accelerated() -> bool:
    found = torch.accelerator.current_accelerator()
    return found is not None and torch.accelerator.is_available()


def _interpreted() -> bool:
    """Whether this process interprets its kernels: as the environment says; without an accelerator, always."""
    if _SWITCH not in os.environ and not _accelerated():
        if "triton.runtime.interpreter" in sys.modules or "triton.language" in sys.modules:
            raise BackendUnavailableError(
                f"Triton was imported before {_SWITCH} was set, so its kernels cannot be interpreted in this process, "
                f"and there is no accelerator to compile them for: set {_SWITCH}=1 before the program starts"
            )
        os.environ[_SWITCH] = "1"
    return os.environ.get(_SWITCH, "0").lower() in ("1", "true", "on", "yes", "y")


INTERPRETED = _interpreted()
"""True: kernels are interpreted, on tensors of any device. False: they are compiled, for tensors of an accelerator."""


def check_device(device: torch.device) -> None:
    """Refuse CPU tensors in a process that compiles its kernels.

    Raises:
        BackendUnavailableError: they cannot be interpreted any more.
    """
    if device.type == "cpu" and not INTERPRETED:
        raise BackendUnavailableError(
            f"this process compiles its Triton kernels, which CPU tensors cannot be given to: set {_SWITCH}=1 before "
            "the program starts to interpret them, or choose another backend for the CPU (`polyattn list`)"
        )


_HERE = contextlib.nullcontext()


def device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """To launch in: Triton launches on the current device, which need not be that of the tensors."""
    device = tensor.device
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _HERE
    return torch.accelerator.device_index(device.index)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors (compute units) of a device; 8 for the interpreter, so that it meets several programs."""
    if INTERPRETED or device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
