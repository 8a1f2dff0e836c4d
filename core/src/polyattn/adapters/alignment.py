"""Where tensors lie in memory. Some of torch's GPU kernels load 16 bytes at a time without looking whether they may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..contract import Bound

__all__ = ["align16", "aligned", "with_aligned_inputs"]


def aligned(*tensors: Tensor) -> bool:
    """Say whether a kernel may load 16 bytes at a time, at the start and at each row of a strided tensor.

    Args:
        tensors: of any shapes and dtypes. One without an address (fake, or inside a transform) counts as aligned.
    """
    try:
        # Asked at every call on a GPU: a third faster than the same with any().
        for tensor in tensors:
            if tensor.data_ptr() & 15 or not (tensor.is_contiguous() or _rows_aligned(tensor)):
                return False
    except RuntimeError:  # no storage: a fake or transformed tensor
        pass
    return True


def _rows_aligned(tensor: Tensor) -> bool:
    bits = 0
    for stride in tensor.stride()[:-1]:
        bits |= stride
    if not bits * tensor.itemsize & 15:
        return True
    # What is odd may be the stride of an axis of one.
    rows = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return not any(size > 1 and stride * tensor.itemsize & 15 for size, stride in rows)


def align16(tensor: Tensor) -> Tensor:
    """Copy a tensor unless it is `aligned` (pytorch#183484, pytorch#170813).

    Args:
        tensor: of any shape and dtype.

    Returns:
        The tensor itself, or a contiguous copy of the same shape and dtype.
    """
    return tensor if aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def with_aligned_inputs(bound: Bound) -> Bound:
    """Make a `Bound` that copies inputs which are not `aligned` before it calls `bound`.

    Args:
        bound: its forward and backward are given the positional tensors of the family's protocol, by `align16`.

    Returns:
        A `Bound` that is not traceable, because a traced tensor has no address.
    """

    def with_placed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor, **kw: Any) -> Any:
            return function(*map(align16, tensors), **kw)

        return call

    backward = None if bound.backward is None else with_placed(bound.backward)
    return Bound(with_placed(bound.forward), backward)
