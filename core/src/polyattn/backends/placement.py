"""Where tensors lie in memory. Some of torch's GPU kernels load 16 bytes at a time without looking whether they may."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..contract import Bound

__all__ = ["placed", "placing"]


def placed(tensor: Tensor) -> Tensor:
    """`tensor`, copied unless it and each of its rows start on a 16-byte boundary (pytorch#183484, pytorch#170813)."""
    start = tensor.data_ptr()
    for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
        if size > 1:
            start |= stride * tensor.itemsize
    return tensor.clone(memory_format=torch.contiguous_format) if start & 15 else tensor


def placing(bound: Bound) -> Bound:
    """`bound` with its tensors placed first."""

    def with_placed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor, **kw: Any) -> Any:
            return function(*map(placed, tensors), **kw)

        return call

    backward = None if bound.backward is None else with_placed(bound.backward)
    return dataclasses.replace(bound, forward=with_placed(bound.forward), backward=backward, simple=None)
