"""Launches that are repeated: what Triton finds out of its arguments in each call takes ten times as long as the launch
itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyattn_triton import runtime  # first: it decides how Triton is imported

import triton  # isort: skip

__all__ = ["Repeated", "repeated"]

_current = getattr(torch._C, "_accelerator_getDeviceIndex", torch.accelerator.current_device_index)


class Repeated:
    """A kernel that was found by Triton and has run, launched again, on the current stream of its device.

    Pointers may be given as addresses, of which nobody asks the driver whose they are. The caller sees to it that the
    arguments are what the kernel was compiled for: dtypes, numbers that are 1 and multiples of 16, addresses that are
    multiples of 16.
    """

    __slots__ = ("_device", "_function", "_hooks", "_kernel", "_packed", "_run", "_stream")

    def __init__(self, kernel: Any, device: torch.device) -> None:
        self._kernel, self._run, self._function = kernel, kernel.run, kernel.function
        self._packed, self._hooks = kernel.packed_metadata, triton.knobs.runtime
        self._stream: Callable[[Any], Any] = triton.runtime.driver.active.get_current_stream
        self._device = device.index

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        if _current() != self._device:
            with torch.accelerator.device_index(self._device):
                self(grid, arguments)
            return
        enter, leave = self._hooks.launch_enter_hook, self._hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            self._kernel[grid](*arguments)  # a profiler is told of each launch
            return
        # As `JITFunction.run` does it.
        self._run(*grid, self._stream(self._device), self._function, self._packed, None, None, None, *arguments)


def repeated(kernel: Any, device: torch.device) -> Repeated | None:
    """From what a launch returned; None: nothing is compiled by the interpreter."""
    return None if runtime.INTERPRETED else Repeated(kernel, device)
