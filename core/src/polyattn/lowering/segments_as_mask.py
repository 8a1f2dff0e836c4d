"""`segments_as_mask`: segments by a kernel for masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite
from .lengths import check_size, combined

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SegmentsAsMask"]


class SegmentsAsMask(Lowering):
    """Writes the segments out as the bool mask that they stand for (S8).

    It is for rules by position and masks beside segments, which `segments_as_sequences` cannot keep, and for graphs.
    """

    name = "segments_as_mask"
    summary = "segments become the bool mask that they stand for"
    fields = frozenset({"segments"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        if request.family != "dense" or not request.segments or request.transform:
            return
        masked = changed(request, segments="", mask="bool" if request.mask == "none" else request.mask)
        # The mask of all queries and keys is written and read: for long sequences far more than any input.
        yield Rewrite((masked,), 30.0, detail="bool [B, 1, S_q, S_k], and every key is computed")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from ..semantics.reference import same_segment
        from .tensors import adapt

        def masked(given: Mapping[str, Any]) -> Mapping[str, Any]:
            rest = {name: value for name, value in given.items() if not name.endswith("_segments")}
            queries: Tensor = given["q_segments"]
            check_size(request, "writing segments out as a mask", queries.numel() * given["k_segments"].shape[1])
            seen = same_segment(queries, given["k_segments"])[:, None]
            return {**rest, "attn_mask": combined(given.get("attn_mask"), seen)}

        return adapt(inner[0], extra=masked)
