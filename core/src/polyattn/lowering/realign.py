"""`realign`: tensors off a 16-byte boundary are copied for kernels that load 16 bytes at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ..contract import Bound
from ..records import AttentionRequest
from .base import Lowering, Rewrite

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
        from ..placement import placing

        return placing(inner[0])
