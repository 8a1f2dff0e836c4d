"""What Hopper's TMA can read and write: addresses and strides of whole 16 bytes. Kernels leave that to their callers,
and what the driver refuses is no error of theirs."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["by_tma", "for_tma"]


def by_tma(tensor: Tensor) -> bool:
    """Whether TMA can take it. Unlike `polyattn.adapters.aligned` this asks of an axis of one too: a
    descriptor
    is made of all strides, those included that nothing is ever multiplied with."""
    bits = tensor.data_ptr()
    for stride in tensor.stride()[:-1]:
        bits |= stride * tensor.itemsize
    return not bits & 15


def for_tma(tensor: Tensor) -> Tensor:
    """`tensor`, copied unless TMA can read it."""
    return tensor if by_tma(tensor) else tensor.clone(memory_format=torch.contiguous_format)
