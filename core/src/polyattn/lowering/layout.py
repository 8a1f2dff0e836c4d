"""`layout`: BSHD by a BHSD kernel and the other way, by views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite
from .widths import odd_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Layout"]

_OTHER = {"BSHD": "BHSD", "BHSD": "BSHD"}


class Layout(Lowering):
    """The axes of heads and positions change places (S1)."""

    name = "layout"
    summary = "the axes of heads and positions are swapped by views"
    fields = frozenset({"layout"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        other = _OTHER.get(request.layout)
        if request.family == "dense" and other is not None:
            misaligned = request.misaligned or odd_rows(request)
            swapped = changed(request, layout=other, misaligned=misaligned)
            yield Rewrite((swapped,), 0.0, detail=f"{request.layout} as {other}")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from .tensors import Route, adapt

        def swap(tensor: Tensor) -> Tensor:
            return tensor.transpose(1, 2)

        both = Route(swap, swap, view=True)
        return adapt(inner[0], query=both, key=both, value=both, out=both, lse=both)
