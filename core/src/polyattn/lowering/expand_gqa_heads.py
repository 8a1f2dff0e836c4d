"""`expand_gqa_heads`: grouped heads by a kernel that knows one K and V head per query head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite
from .lengths import check_size
from .widths import odd_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ExpandGQAHeads"]


class ExpandGQAHeads(Lowering):
    """Query head h reads key head h // G, G = H_q / H_kv (S1): each key head is given G times, its gradient is the sum
    of theirs. One key head for all is given by a view."""

    name = "expand_gqa_heads"
    summary = "key and value heads are repeated"
    fields = frozenset({"group", "kv_heads"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        if request.group == 1 or request.family not in ("dense", "varlen"):
            return
        one = request.kv_heads == 1
        misaligned = request.misaligned or (one and odd_rows(request))
        repeated = changed(request, kv_heads=request.heads, misaligned=misaligned)
        # K and V of H_q heads are written, and read by the kernel; their gradients are read once more.
        cost = (0.0 if one else 4.0) + (2.0 if request.grad else 0.0)
        yield Rewrite((repeated,), cost, detail=f"H_kv {request.kv_heads} -> {request.heads}")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch

        from .tensors import Route, adapt

        H_kv, group = request.kv_heads, request.group
        axis = 2 if request.layout == "BSHD" else 1

        def repeat(tensor: Tensor) -> Tensor:
            check_size(request, "repeating key heads", tensor.numel() * group)
            sizes = [*tensor.shape[: axis + 1], group, *tensor.shape[axis + 1 :]]
            return tensor.unsqueeze(axis + 1).expand(sizes).flatten(axis, axis + 1)

        def summed(grad: Tensor) -> Tensor:
            wide = torch.promote_types(grad.dtype, torch.float32)
            return torch.unflatten(grad, axis, (H_kv, group)).sum(axis + 1, dtype=wide).to(grad.dtype)

        shared = Route(repeat, summed)
        return adapt(inner[0], key=shared, value=shared)
