"""`fold_scale`: another scale by a kernel that knows D ** -0.5 only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FoldScale"]

_FACTORS = {"float64": math.inf, "float32": math.inf, "bfloat16": math.inf, "float16": 16.0}
"""Largest factor on a query by dtype; float16 ends at 65504, which a larger factor brings into reach."""


class FoldScale(Lowering):
    """scale * q . k = D ** -0.5 * (q * scale * D ** 0.5) . k.

    A factor that is a power of two rounds nothing. Any other rounds the query once more in its dtype, which moves a
    logit less than its own rounding in that dtype would (S2).
    """

    name = "fold_scale"
    summary = "queries are multiplied by scale * sqrt(D)"
    fields = frozenset({"scale"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        # The scale of absorbed MLA is never that of its width.
        if request.scale is None or request.family not in ("dense", "varlen", "paged"):
            return
        factor = _factor(request)
        if abs(factor) <= _FACTORS.get(request.dtype, 0.0):
            yield Rewrite((changed(request, scale=None),), 2.0, detail=f"Q * {factor:.4g}")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from .tensors import Route, adapt

        factor = _factor(request)

        def scaled(tensor: Tensor) -> Tensor:
            return tensor * factor

        return adapt(inner[0], query=Route(scaled, scaled))


def _factor(request: AttentionRequest) -> float:
    return 1.0 if request.scale is None else request.scale * math.sqrt(request.head_dim)
