"""`alibi_as_bias`: ALiBi by a kernel that adds masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite
from .lengths import check_size, per_call, position_axis

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AlibiAsBias"]


class AlibiAsBias(Lowering):
    """Writes the slopes out as the additive mask that they stand for (S8), in float32, or float64 for such tensors.

    Of packed and paged calls it counts from the end of each sequence, unless all have as many queries as keys.
    """

    name = "alibi_as_bias"
    summary = "ALiBi's slopes become an additive mask of all queries and keys"
    fields = frozenset({"alibi"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        floats = request.dtype in ("float64", "float32", "bfloat16", "float16")
        served = request.family in ("dense", "varlen", "paged") and floats and not request.transform
        # Distances to the keys of other parts are not known, and a tree mask stays what its kernels read.
        if not request.alibi or not served or request.tree or request.kv_parts or request.chunked_prefix:
            return
        added = changed(request, alibi=False, mask="additive")
        # Four bytes for each head, query and key are written and read: for long sequences far more than any input.
        yield Rewrite((added,), 30.0, detail="-slope * distance written out as [N|1, H_q, S_q, S_k]")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch

        from ..semantics.reference import alibi_bias
        from ..semantics.reference.visibility import positions
        from .tensors import adapt

        wide = torch.float64 if request.dtype == "float64" else torch.float32
        from_start = request.causal == "top_left" or request.s_relation == "equal"

        def lengths(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> tuple[int, int, Any]:
            """(S_q, S_k, position of the first query), of which the last is a tensor [N, 1, 1] for several lengths."""
            if request.family == "dense":
                s = position_axis(request.layout)
                return query.shape[s], key.shape[s], None
            tables = given if request.family == "varlen" else given["tables"]._asdict()
            longest = tables["max_seqlen_q"], tables["max_seqlen_k"]
            if from_start:
                return *longest, 0
            keys = tables["seq_lens"] if request.family == "paged" else tables["cu_seqlens_k"].diff()
            return *longest, (keys - tables["cu_seqlens_q"].diff())[:, None, None]

        def around(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Bound:
            S_q, S_k, first = lengths(query, key, given)
            rows = first.shape[0] if isinstance(first, torch.Tensor) else 1
            check_size(request, "writing ALiBi out as a mask", rows * request.heads * S_q * S_k)

            def biased(given: Mapping[str, Any]) -> Mapping[str, Any]:
                rest = {name: value for name, value in given.items() if name != "alibi"}
                p, j = positions(S_q, S_k, request.causal, first, query.device)
                bias = alibi_bias(given["alibi"].to(wide), p, j).reshape(rows, request.heads, S_q, S_k)
                mask = given.get("attn_mask")
                if mask is not None:
                    bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask
                return {**rest, "attn_mask": bias}

            return adapt(inner[0], extra=biased)

        return per_call(inner, around)
