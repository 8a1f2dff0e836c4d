"""`pack_sequences`: a dense batch by a kernel for packed sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite
from .lengths import per_call, position_axis
from .widths import odd_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PackSequences"]


class PackSequences(Lowering):
    """[B, S, H, D] is a packed batch of B sequences of S tokens, [B * S, H, D] with cu_seqlens 0, S, 2 S ... (S1).

    Every other rule means the same for a sequence as for a row of the batch, masks included (S8).
    """

    name = "pack_sequences"
    summary = "the batch as packed sequences of equal lengths"
    fields = frozenset({"family"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        if request.family != "dense" or request.transform or request.tree or request.segments:
            return
        # A packed call knows equal lengths, one query, and any mixture, which is called more.
        relation = request.s_relation if request.s_relation in ("equal", "one") else "more"
        packed = changed(request, family="varlen", layout="THD", s_relation=relation)
        if request.layout == "BSHD":
            yield Rewrite((packed,), 0.5, detail="[B, S, H, D] viewed as [B * S, H, D]")
        else:
            # Q, K and V are read and written; of a batch of one they are views, which may leave the boundaries.
            packed = changed(packed, misaligned=request.misaligned or odd_rows(request))
            yield Rewrite((packed,), 6.0, detail="[B, H, S, D] copied to [B * S, H, D]")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch

        from .tensors import Route, adapt

        bshd, s = request.layout == "BSHD", position_axis(request.layout)

        def pack(tensor: Tensor) -> Tensor:
            return (tensor if bshd else tensor.transpose(1, 2)).flatten(0, 1)

        def around(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Bound:
            B, S_q, S_k = query.shape[0], query.shape[s], key.shape[s]

            def lens(given: Mapping[str, Any]) -> Mapping[str, Any]:
                count = torch.arange(B + 1, dtype=torch.int32, device=query.device)
                starts = count * S_q
                # One tensor for both is how a packed call says that lengths are equal.
                ends = starts if request.s_relation == "equal" else count * S_k
                known = {"cu_seqlens_q": starts, "cu_seqlens_k": ends, "max_seqlen_q": S_q, "max_seqlen_k": S_k}
                return {**given, **known}

            def unpack(S: int) -> Any:
                def back(tensor: Tensor) -> Tensor:
                    rows = torch.unflatten(tensor, 0, (B, S))
                    return rows if bshd else rows.transpose(1, 2)

                return back

            queries, keys = Route(pack, unpack(S_q)), Route(pack, unpack(S_k))
            return adapt(inner[0], query=queries, key=keys, value=keys, out=queries, lse=queries, extra=lens)

        return per_call(inner, around)
