"""`realign`: tensors off a 16-byte boundary are copied for kernels that load 16 bytes at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
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
        moved = changed(request, misaligned=False)
        if request.misaligned and request.family in ("dense", "varlen"):
            yield Rewrite((moved,), 6.0, detail="those of Q, K and V that are off are copied")
        if request.misaligned and request.family in ("paged", "mla"):
            yield Rewrite((moved,), 2.0, detail="queries and new rows that are off are copied, never the cache")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from ..adapters.alignment import align16, with_aligned_inputs

        if request.family in ("dense", "varlen"):
            return with_aligned_inputs(inner[0])

        def forward(query: Tensor, *caches: Tensor, **given: Any) -> Any:
            rows = {name: align16(given[name]) for name in ("key", "value") if given.get(name) is not None}
            return inner[0].forward(align16(query), *caches, **{**given, **rows})

        return Bound(forward)
