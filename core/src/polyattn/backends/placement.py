"""Where tensors lie in memory. Some of torch's GPU kernels load 16 bytes at a time without looking whether they may."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["placed"]


def placed(tensor: Tensor) -> Tensor:
    """`tensor`, copied unless it and each of its rows start on a 16-byte boundary (pytorch#183484, pytorch#170813)."""
    start = tensor.data_ptr()
    for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
        if size > 1:
            start |= stride * tensor.itemsize
    return tensor.clone(memory_format=torch.contiguous_format) if start & 15 else tensor
