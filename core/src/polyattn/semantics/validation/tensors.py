"""Checks of one tensor: its kind, rank and strides, and whether its contents can be read."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ... import envvars
from ...errors import InvalidInputError

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def local_only(name: str) -> str:
    return f"{name} is a DTensor; attention is local: pass {name}.to_local()"


def check_plain(name: str, value: Tensor) -> None:
    """Check that a tensor has its numbers in one piece of this process's memory."""
    if value.is_nested:
        raise InvalidInputError(
            f"{name} is a nested tensor; pass packed sequences to varlen_attention instead "
            f"(its .values() and int32 .offsets())"
        )
    if type(value) is not Tensor and any(c.__name__ == "DTensor" for c in type(value).__mro__):
        raise InvalidInputError(local_only(name))
    if value.layout is not torch.strided:
        kind = str(value.layout).removeprefix("torch.").lstrip("_")
        raise InvalidInputError(f"{name} is a tensor of layout {kind}; a dense one is needed: pass {name}.to_dense()")


def check_tensor(name: str, value: Any, rank: int, shape: str) -> None:
    """Check that an argument is a plain tensor of `rank` dimensions. shape: in words, such as "[B, S, H, D]".

    Raises:
        InvalidInputError: names the argument, what it is and what is needed.
    """
    if not isinstance(value, Tensor):
        raise InvalidInputError(f"{name} is a {type(value).__name__}, a tensor {shape} is needed")
    if type(value) is not Tensor or value.is_nested or value.layout is not torch.strided:
        check_plain(name, value)
    if value.ndim != rank:
        raise InvalidInputError(f"{name} has {value.ndim} dimensions {tuple(value.shape)}, {rank} are needed: {shape}")


def check_index(name: str, value: Any, rank: int, shape: str) -> None:
    check_tensor(name, value, rank, shape)
    if value.dtype != torch.int32:
        raise InvalidInputError(f"{name} is {value.dtype}; int32 is needed: {name}.to(torch.int32)")
    check_dense_axis(name, value)


def check_dense_axis(name: str, tensor: Tensor) -> None:
    """Check that the last stride is 1 (S1)."""
    if tensor.shape[-1] != 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise InvalidInputError(
            f"{name}'s last axis is not dense (strides {tuple(tensor.stride())}); pass {name}.contiguous()"
        )


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements may be in one place: an axis steps less far than those within it reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


_read: contextvars.ContextVar[bool] = contextvars.ContextVar("polyattn_read_contents", default=True)


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Leave the contents of tensors unread inside, for a caller that made them right itself: a step that is recorded
    must read none on the host."""
    token = _read.set(False)
    try:
        yield
    finally:
        _read.reset(token)


def contents_readable(tensor: Tensor) -> bool:
    """Return whether tensor contents are checked: on the CPU where there are any, on a device only under
    POLYATTN_VALIDATE=1."""
    if tensor.device.type == "cpu":
        return _read.get() and not has_shapes_only(tensor)
    # Only torch's CUDA builds can be asked whether they capture.
    return envvars.flag("POLYATTN_VALIDATE") and not (
        tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )


def has_shapes_only(tensor: Any) -> bool:
    """Return whether a tensor, meta or fake, has no contents: a packed call then gives what its custom op gives in a
    trace."""
    return getattr(tensor, "is_meta", False) or type(tensor).__name__ == "FakeTensor"
