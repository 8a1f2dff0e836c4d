"""`pad_value_dim`: values get columns of zeros, and the output loses them again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite
from .widths import wider

__all__ = ["PadValueDim"]


class PadValueDim(Lowering):
    """Pads V with columns of zeros, which give columns of zeros in the output and change no other."""

    name = "pad_value_dim"
    summary = "values are padded with zeros and the output is cropped"
    fields = frozenset({"v_head_dim", "dims", "same_dims"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        if request.family not in ("dense", "varlen"):
            return
        D, D_v = request.dims
        for width in sorted({*wider(D_v), *([D] if D_v < D else [])}):
            padded = changed(request, v_head_dim=width)
            # V is read and written once more, and the kernel reads V and writes the output wider; cropping is a view.
            yield Rewrite((padded,), 1 + width / D_v + 2 * (width / D_v - 1), detail=f"D_v {D_v} -> {width}")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from .tensors import adapt, columns

        route = columns(request, request.dims[1], rewrite.inner[0].dims[1])
        return adapt(inner[0], value=route, out=route)
