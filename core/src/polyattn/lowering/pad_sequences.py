"""`pad_sequences`: packed sequences by a kernel for dense batches with masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound, relation
from ..contract.request import SRelation, changed
from .base import Lowering, Rewrite
from .lengths import RELATIONS, check_size, combined, of_one_kind, per_call

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PadSequences"]

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _relations(request: AttentionRequest) -> tuple[SRelation, ...]:
    """Return what the longest sequences may be to each other."""
    known: dict[str, tuple[SRelation, ...]] = {"equal": ("equal",), "one": ("one", "equal")}
    return known.get(request.s_relation, RELATIONS)


class PadSequences(Lowering):
    """Lays each sequence into a row of a batch, as long as the longest, with zeros behind it.

    Who sees whom becomes a mask: lengths, causal alignment of each sequence by itself, window and chunk. Nobody sees a
    padded key; a padded query sees nothing, so its output is 0 and its LSE -inf, in the backward too (S7).
    """

    name = "pad_sequences"
    summary = "sequences are padded to the longest, with a mask"
    fields = frozenset({"family"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        # The padding depends on the rest of the batch, and ALiBi's distances would count from its end.
        if request.family != "varlen" or request.transform or request.batch_invariant or request.alibi or request.tree:
            return
        padded = changed(
            request,
            family="dense",
            layout="BSHD",
            causal="none",
            window=(-1, -1),
            chunk=0,
            mask="bool" if request.mask == "none" else request.mask,
            # All of it is fresh memory, with a row for nothing at least.
            zero_size=False,
            misaligned=False,
        )
        inner = tuple(changed(padded, s_relation=found) for found in _relations(request))
        # Q, K, V and out are read and written, the mask is written and read, and the kernel works on the padding too.
        yield Rewrite(inner, 12.0, detail="[T, H, D] copied to [N, max_seqlen, H, D], with lengths as a mask")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from functools import partial

        import torch.nn.functional as F

        from ..semantics.reference import visible
        from .padding import Padded
        from .tensors import Route, adapt

        inner = of_one_kind(inner, rewrite.inner)
        kernels = dict(zip(_relations(request), inner, strict=True))

        def sides(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> tuple[Padded, Padded]:
            L_q, L_k = given["max_seqlen_q"], given["max_seqlen_k"]
            if request.s_relation == "equal":
                both = Padded.of(given["cu_seqlens_q"], query.shape[0], min(L_q, L_k))
                return both, both
            queries = Padded.of(given["cu_seqlens_q"], query.shape[0], L_q)
            return queries, Padded.of(given["cu_seqlens_k"], key.shape[0], L_k)

        def mask(attn_mask: Tensor | None, queries: Padded, keys: Padded) -> Tensor | None:
            allowed = queries.inside()[:, :, None] & keys.inside()[:, None, :]
            same = request.causal == "top_left" or queries is keys
            offset = 0 if same else (keys.lengths - queries.lengths)[:, None, None]
            rules: dict[str, Any] = {"causal": request.causal, "window": request.window, "chunk": request.chunk}
            seen = visible(queries.longest, keys.longest, q_offset=offset, device=allowed.device, **rules)
            allowed = allowed if seen is None else allowed & seen
            if attn_mask is not None:
                attn_mask = attn_mask[:, :, : queries.longest, : keys.longest]
                if request.zero_size:
                    attn_mask = F.pad(attn_mask, [n for size in reversed(attn_mask.shape) for n in (0, int(not size))])
            return combined(attn_mask, allowed[:, None])

        def around(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Bound:
            queries, keys = sides(query, key, given)
            for side, heads in ((queries, request.heads), (keys, request.kv_heads)):
                check_size(request, "padding sequences to the longest", side.rows * heads * max(request.dims))
            rows, columns = (Route(side.spread, side.collect) for side in (queries, keys))
            softmax = Route(partial(queries.spread, value=float("-inf")), queries.collect)

            def extra(given: Mapping[str, Any]) -> Mapping[str, Any]:
                rest = {name: value for name, value in given.items() if name not in _LENGTHS}
                return {**rest, "attn_mask": mask(given.get("attn_mask"), queries, keys)}

            kernel = kernels[relation(queries.longest, keys.longest)]
            return adapt(kernel, query=rows, key=columns, value=columns, out=rows, lse=softmax, extra=extra)

        return per_call(inner, around)
