"""More than one GPU, as far as libraries notice that launch kernels on the current device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from polyattn_cuda import devices

__all__ = ["Gpus", "launched"]


class Gpus:
    """GPUs of which one has all tensors, here those of the CPU.

    Attributes:
        here: the one with the tensors. current: the current one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: int = 1, current: int = 0) -> None:
        self.here, self.current = here, current
        monkeypatch.setattr(Tensor, "get_device", lambda tensor: self.here)
        monkeypatch.setattr(torch.cuda, "device_of", self._made_current)
        for module in (torch.cuda, devices):
            monkeypatch.setattr(module, "current_device", lambda: self.current)

    @contextlib.contextmanager
    def _made_current(self, tensor: Tensor) -> Iterator[None]:
        before, self.current = self.current, tensor.get_device()
        yield
        self.current = before


def launched(tensor: Tensor) -> int:
    """Launch a kernel over `tensor` on the current device, which is returned; -1 where there is none."""
    here = tensor.get_device()
    if here >= 0 and here != torch.cuda.current_device():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return here
