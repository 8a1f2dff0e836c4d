"""`pad_head_dim`: queries and keys get columns of zeros, which add nothing to a logit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite
from .widths import wider

__all__ = ["PadHeadDim"]


class PadHeadDim(Lowering):
    """q . k over D columns is the same over D' of which the last are 0. The scale stays that of D."""

    name = "pad_head_dim"
    summary = "queries and keys are padded with zeros"
    fields = frozenset({"head_dim", "dims", "v_head_dim", "same_dims"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        if request.family not in ("dense", "varlen"):
            return
        D, D_v = request.dims
        for width in sorted({*wider(D), *([D_v] if D_v > D else [])}):
            padded = changed(request, head_dim=width, v_head_dim=D_v, scale=request.softmax_scale)
            # Q and K are read and written once more, and the kernel reads them wider.
            yield Rewrite((padded,), 2 * (1 + width / D) + 2 * (width / D - 1), detail=f"D {D} -> {width}")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from .tensors import adapt, columns

        route = columns(request, request.head_dim, rewrite.inner[0].head_dim)
        return adapt(inner[0], query=route, key=route)
