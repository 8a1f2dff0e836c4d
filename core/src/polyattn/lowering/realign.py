"""`realign`: tensors off a 16-byte boundary are copied for kernels that load 16 bytes at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import Bound
from ..records import AttentionRequest
from .base import Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Realign"]


class Realign(Lowering):
    """The same numbers in fresh, contiguous memory. Addresses are known on the host: nothing waits for the device."""

    name = "realign"
    summary = "tensors off a 16-byte boundary are copied"
    fields = frozenset({"misaligned"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        # A cache is not copied for a call, and its new rows would be lost.
        if request.misaligned and request.family in ("dense", "varlen"):
            moved = dataclasses.replace(request, misaligned=False)
            yield Rewrite((moved,), 6.0, detail="those of Q, K and V that are off are copied")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        def placing(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*tensors: Tensor, **given: Any) -> Any:
                return function(*map(_placed, tensors), **given)

            return call

        kernel = inner[0]
        backward = None if kernel.backward is None else placing(kernel.backward)
        # Not traceable: a traced tensor has no address.
        return Bound(placing(kernel.forward), backward)


def _placed(tensor: Tensor) -> Tensor:
    import torch

    start = tensor.data_ptr()
    if not tensor.is_contiguous():
        for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
            if size > 1:
                start |= stride * tensor.itemsize
    return tensor.clone(memory_format=torch.contiguous_format) if start & 15 else tensor
