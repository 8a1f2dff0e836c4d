"""`segments_as_sequences`: segments by a kernel for packed sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite
from .lengths import per_call
from .widths import odd_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SegmentsAsSequences"]


class SegmentsAsSequences(Lowering):
    """Makes a packed sequence of each segment of each row (S8): the kernel computes no score that would be hidden.

    Tokens are sorted by segment where they are not in that order. That keeps their order within a segment, which is
    what causal attention of a row with itself asks for, and not their distances.
    """

    name = "segments_as_sequences"
    summary = "each segment becomes a packed sequence"
    fields = frozenset({"segments", "family"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        if request.family != "dense" or not request.segments or request.transform or request.tree:
            return
        # How many segments there are is read from the device, which a recorded graph cannot do.
        if request.graph_capture or request.zero_size:
            return
        by_distance = request.window != (-1, -1) or request.chunk or request.alibi or request.mask != "none"
        itself = request.segments == "shared" and request.s_relation == "equal"
        if by_distance or (request.causal != "none" and not itself):
            return
        packed = changed(
            request,
            family="varlen",
            layout="THD",
            segments="",
            s_relation="equal" if itself else "more",
            # Of heads first and a batch of one they are views, which may leave the boundaries.
            misaligned=request.misaligned or (request.layout == "BHSD" and odd_rows(request)),
        )
        # Q, K, V and out are read and written where they must be sorted, and the segments are looked at.
        yield Rewrite((packed,), 8.0, detail="[B, S, H, D] as [B * S, H, D], sorted by segment where it is not")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch

        from .tensors import Route, adapt

        bshd = request.layout == "BSHD"

        def numbered(segments: Tensor, low: Tensor, count: Tensor) -> Tensor:
            """A number for each token that says its row and its segment, int64 [B * S]."""
            row = torch.arange(segments.shape[0], device=segments.device)[:, None]
            return (row * count + (segments.long() - low)).flatten()

        def packing(numbers: Tensor, S: int) -> tuple[Route, Tensor]:
            """(the way of a tensor there and back, the numbers in order)."""
            order = inverse = None
            if not bool((numbers.diff() >= 0).all()):
                numbers, order = numbers.sort(stable=True)
                inverse = order.argsort()

            def there(tensor: Tensor) -> Tensor:
                rows = (tensor if bshd else tensor.transpose(1, 2)).flatten(0, 1)
                return rows if order is None else rows.index_select(0, order)

            def back(packed: Tensor) -> Tensor:
                packed = packed if inverse is None else packed.index_select(0, inverse)
                rows = torch.unflatten(packed, 0, (-1, S))
                return rows if bshd else rows.transpose(1, 2)

            return Route(there, back), numbers

        def around(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Bound:
            queries, keys = given["q_segments"], given["k_segments"]
            low = torch.minimum(queries.min(), keys.min()).long()
            count = torch.maximum(queries.max(), keys.max()).long() - low + 1
            rows, q_numbers = packing(numbered(queries, low, count), queries.shape[1])
            columns, k_numbers = rows, q_numbers
            if request.segments != "shared":
                columns, k_numbers = packing(numbered(keys, low, count), keys.shape[1])
            found: Tensor = torch.unique(torch.cat([q_numbers, k_numbers]))

            def starts(numbers: Tensor) -> Tensor:
                first = torch.searchsorted(numbers, found)
                return torch.cat([first, first.new_tensor([numbers.shape[0]])]).int()

            q_starts = starts(q_numbers)
            k_starts = q_starts if request.segments == "shared" else starts(k_numbers)
            lens = {
                "cu_seqlens_q": q_starts,
                "cu_seqlens_k": k_starts,
                "max_seqlen_q": int(q_starts.diff().max()),
                "max_seqlen_k": int(k_starts.diff().max()),
            }

            def packed(given: Mapping[str, Any]) -> Mapping[str, Any]:
                return {**{name: value for name, value in given.items() if not name.endswith("_segments")}, **lens}

            return adapt(inner[0], query=rows, key=columns, value=columns, out=rows, lse=rows, extra=packed)

        return dataclasses.replace(per_call(inner, around), traceable=False)
