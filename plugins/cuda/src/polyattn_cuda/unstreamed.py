"""Calling libraries that launch kernels without naming a stream: these run on the device's default one, which torch's
other streams neither wait for nor hold up. SageAttention 2 and SpargeAttn are such (csrc of d1a57a5 and bfd980b)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["on_default_stream"]


def on_default_stream(kernel: Callable[..., Any], query: Tensor, *args: Any, **given: Any) -> Any:
    """Call `kernel(query, *args, **given)`, in turn with the current stream, whichever that is.

    The current device is that of the query meanwhile: these libraries make the values' current, and leave it so.

    Returns:
        Its tensor, or its tuple of tensors; the allocator knows that the current stream uses them.
    """
    with torch.cuda.device_of(query):
        if not query.is_cuda:  # an emulator
            return kernel(query, *args, **given)
        current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
        if current == default:
            return kernel(query, *args, **given)
        default.wait_stream(current)
        with torch.cuda.stream(default):
            found = kernel(query, *args, **given)
        current.wait_stream(default)
    for tensor in found if isinstance(found, tuple) else (found,):
        tensor.record_stream(current)
    return found
