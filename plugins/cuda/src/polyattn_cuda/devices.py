"""Which device is current. Libraries that launch kernels without looking where their tensors are launch them there."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

__all__ = ["current_device", "current_for", "is_current"]

# Its Python name is a call more; builds without CUDA have that alone.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

_AS_IT_IS = contextlib.nullcontext()


def is_current(tensor: Tensor) -> bool:
    """Whether kernels over `tensor` are launched where it is: on the current device, or on none, as emulators are."""
    index = tensor.get_device()
    return index < 0 or index == current_device()


def current_for(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the device of `tensor` the current one. Where it is already, as nearly always, nothing is switched: that
    takes a third of what `torch.cuda.device_of` does."""
    return _AS_IT_IS if is_current(tensor) else torch.cuda.device_of(tensor)
