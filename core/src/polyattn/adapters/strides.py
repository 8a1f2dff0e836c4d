"""Axes of one, whose strides nothing is ever multiplied with: they may be any number, and torch calls such a tensor
contiguous. Kernels look at them all the same, as Hopper's TMA, which makes a descriptor of all strides and wants whole
16 bytes of each, or as a library that asks for a last stride of 1."""

from __future__ import annotations

import functools
import operator

from torch import Tensor

__all__ = ["dense_unit_strides", "normalise_unit_strides", "normalise_unit_strides_bshd", "with_unit_last_stride"]


def normalise_unit_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Give axes of one the strides of a dense tensor, if some stride of the tensors is not of whole 16 bytes.

    Args:
        tensors: of one dtype, at least two axes each.

    Returns:
        Views of the same values, or the tensors themselves.

    Of tensors that `polyattn.adapters.alignment.aligned` lets pass those are the strides of axes of one,
    and so no copy is made.
    """
    strides = functools.reduce(operator.or_, (stride for tensor in tensors for stride in tensor.stride()[:-1]))
    return tuple(map(dense_unit_strides, tensors)) if strides * tensors[0].itemsize & 15 else tensors


def normalise_unit_strides_bshd(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """`normalise_unit_strides` of three [B, S, H, D] of two bytes: asked at every call, and twice as fast as that."""
    (a, b, c, _), (d, e, f, _), (g, h, i, _) = query.stride(), key.stride(), value.stride()
    return normalise_unit_strides(query, key, value) if (a | b | c | d | e | f | g | h | i) & 7 else (query, key, value)


def dense_unit_strides(tensor: Tensor) -> Tensor:
    """A view with the strides that a dense tensor has along axes of one.

    Not by `as_strided`, whose gradient of an expanded tensor is not that tensor's: it takes the mean of all entries
    that share a place.
    """
    for axis in range(tensor.ndim - 1, -1, -1):
        if tensor.shape[axis] == 1:
            tensor = tensor.squeeze(axis).unsqueeze(axis)
    return tensor


def with_unit_last_stride(table: Tensor) -> Tensor:
    """A table of which the last stride is 1, where it was let pass because its last axis has one entry."""
    return table if table.stride(-1) == 1 else dense_unit_strides(table)
