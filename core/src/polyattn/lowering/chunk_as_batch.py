"""`chunk_as_batch`: chunked-local attention by a kernel without chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound, relation
from ..contract.request import changed
from .base import Lowering, Rewrite
from .lengths import check_size, longer, of_one_kind, per_call, position_axis
from .widths import odd_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ChunkAsBatch"]


class ChunkAsBatch(Lowering):
    """A block of C positions sees itself and no other (S4), so that each becomes a causal sample of its own.

    The last block is made as long as the others by zeros behind it, which no query before them sees. One query at the
    end sees the keys of its block alone, which need no rule.
    """

    name = "chunk_as_batch"
    summary = "each block of chunked-local attention becomes a sample"
    fields = frozenset({"chunk"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        plain = request.mask == "none" and not request.tree and not request.segments
        if request.family != "dense" or not request.chunk or not plain or request.transform or request.zero_size:
            return
        odd = request.misaligned or odd_rows(request)
        whole = changed(request, chunk=0)
        if request.s_relation == "equal":
            inner = changed(whole, causal="bottom_right", misaligned=odd)
            # Blocks of BSHD are views where they are whole. Else Q, K, V and out are read and written.
            cost = 1.0 if request.layout == "BSHD" else 6.0
            yield Rewrite((inner,), cost, detail=f"blocks of {request.chunk} tokens along the batch")
        elif request.s_relation == "one" and request.causal != "top_left":
            last = changed(whole, causal="none", misaligned=odd)
            # The block may have one key.
            inners = (last, changed(last, s_relation="equal"))
            yield Rewrite(inners, 0.0, detail=f"the last block of {request.chunk} keys")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch

        from .tensors import Route, adapt

        inner = of_one_kind(inner, rewrite.inner)
        s = position_axis(request.layout)

        def last_block(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Bound:
            S_k = key.shape[s]
            first = (S_k - 1) // request.chunk * request.chunk
            keys = Route(lambda t: t.narrow(s, first, S_k - first), lambda grad: longer(grad, s, front=first))
            return adapt(inner[0 if relation(1, S_k - first) == "one" else 1], key=keys, value=keys)

        def blocks(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Bound:
            B, S = query.shape[0], query.shape[s]
            size = min(request.chunk, S)
            count = -(-S // size)
            heads = max(request.heads, request.kv_heads)
            check_size(request, "making the last block whole", B * count * size * heads * max(request.dims))

            def there(tensor: Tensor) -> Tensor:
                if count * size != S:
                    tensor = longer(tensor, s, back=count * size - S)
                tensor = torch.unflatten(tensor, s, (count, size))
                return (tensor if s == 1 else tensor.transpose(1, 2)).flatten(0, 1)

            def back(tensor: Tensor) -> Tensor:
                tensor = torch.unflatten(tensor, 0, (B, count))
                return (tensor if s == 1 else tensor.transpose(1, 2)).flatten(s, s + 1).narrow(s, 0, S)

            both = Route(there, back)
            return adapt(inner[0], query=both, key=both, value=both, out=both, lse=both)

        return per_call(inner, blocks if request.s_relation == "equal" else last_block)
