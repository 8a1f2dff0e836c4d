"""`crop_value_dim`: wide values by a kernel for narrow ones, a slice of columns at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import CALL, Lowering, Rewrite
from .lengths import of_one_kind
from .widths import odd_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CropValueDim"]

_WIDTHS = (64, 128, 256)


class CropValueDim(Lowering):
    """Calls the kernel on slices of the columns of V. Each column of the output depends on the same column of V alone.

    The LSE depends on no column of V.

    A gradient is linear in (dout, delta), and delta is a sum over columns: that of Q and K is the sum of the slices'.
    """

    name = "crop_value_dim"
    summary = "values are served in slices of their columns"
    fields = frozenset({"v_head_dim", "dims", "same_dims"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        D, D_v = request.dims
        # Each call would drop other weights.
        if request.family not in ("dense", "varlen") or request.dropout:
            return
        misaligned = request.misaligned or odd_rows(request)
        for width in sorted({D, *_WIDTHS}, reverse=True):
            if width < D_v:
                widths = [width, D_v % width] if D_v % width else [width]
                inner = tuple(changed(request, v_head_dim=w, misaligned=misaligned) for w in widths)
                more = -(-D_v // width) - 1
                # Each further call reads Q and K again and computes all logits again; the output is put together.
                detail = f"D_v {D_v} in {more + 1} slices of {width}"
                yield Rewrite(inner, more * (CALL + 4.0) + 2.0, detail=detail)

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch

        inner = of_one_kind(inner, rewrite.inner)
        width, D_v = rewrite.inner[0].dims[1], request.dims[1]
        traceable = all(kernel.traceable for kernel in inner)

        def slices() -> Iterator[tuple[Bound, slice]]:
            for first in range(0, D_v, width):
                yield inner[0 if first + width <= D_v else 1], slice(first, min(first + width, D_v))

        def forward(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, **given: Any) -> Any:
            found = [
                kernel.forward(q, k, v[..., part], out=None if out is None else out[..., part], **given)
                for kernel, part in slices()
            ]
            if not isinstance(found[0], tuple):
                return torch.cat(found, -1) if out is None else out
            return torch.cat([part[0] for part in found], -1) if out is None else out, found[0][1]

        if inner[0].backward is None:
            return Bound(forward, traceable=traceable)

        def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **given: Any) -> Any:
            found = []
            for kernel, part in slices():
                gradients: Any = kernel.backward
                found.append(gradients(dout[..., part], q, k, v[..., part], out[..., part], lse, **given))
            wide = torch.promote_types(q.dtype, torch.float32)
            dq, dk = (sum(grads[i].to(wide) for grads in found).to(q.dtype) for i in (0, 1))
            return dq, dk, torch.cat([grads[2] for grads in found], -1)

        return Bound(forward, backward, traceable)
