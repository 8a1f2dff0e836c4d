"""`chunked_prefix_by_lse`: a long prefix in chunks, by any kernel that returns its LSE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..contract import AttentionRequest, Bound, PagedTables
from ..contract.request import changed
from .base import CALL, Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ChunkedPrefixByLSE"]


class ChunkedPrefixByLSE(Lowering):
    """Attends whole chunks of the keys before the queries one by one, without a causal mask; what is left of the
    prefix goes with the new tokens, under theirs. All are merged by their LSE (S6).

    A chunk is a slice of columns of the page table. How many there are follows from `max_seqlen_k`; a sequence that is
    shorter has no keys in the last ones.
    """

    name = "chunked_prefix_by_lse"
    summary = "the prefix in chunks, merged by LSE"
    fields = frozenset({"chunked_prefix"})
    tokens: ClassVar[int] = 8192
    """Of a chunk, to the next multiple of the page size."""

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        served = request.family in ("paged", "mla") and request.phase in ("prefill", "extend")
        bounded = request.window != (-1, -1) or request.chunk or request.mask != "none" or request.alibi
        aligned = request.causal in ("none", "bottom_right")
        if not request.chunked_prefix or not served or bounded or not aligned or request.kv_parts:
            return
        last = changed(request, chunked_prefix=False, lse=True, sinks=False)
        # A chunk may hold fewer keys than there are queries, and new rows are not in it.
        chunk = changed(last, causal="none", s_relation="more", save_kv_cache=None)
        yield Rewrite((last, chunk), CALL + 3.0, detail=f"chunks of {self._chunk(request)} tokens")

    def _chunk(self, request: AttentionRequest) -> int:
        return -(-self.tokens // request.page_size) * request.page_size

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from .pages import from_column, merged

        last, chunk, size, page = *inner, self._chunk(request), request.page_size
        fresh = ("key", "value")

        def forward(
            *tensors: Tensor,
            tables: PagedTables,
            sinks: Tensor | None = None,
            out: Tensor | None = None,
            **given: Any,
        ) -> Any:
            page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = tables[:5]
            # Of a sequence with queries at most S_k - 1 keys are prefix.
            most = max(min(max_seqlen_k, page_table.shape[1] * page) - 1, 0) // size
            whole = (seq_lens - cu_seqlens_q.diff()).clamp(min=0) // size
            rest = min(max_seqlen_k, size - 1 + max_seqlen_q)
            columns = min(page_table.shape[1], -(-rest // page) if most else page_table.shape[1])
            table = from_column(page_table, whole * (size // page), columns) if most else page_table
            own = tables.changed(page_table=table, seq_lens=seq_lens - whole * size, max_seqlen_k=rest)
            parts = [last.forward(*tensors, tables=own, **given)]
            kept = {name: value for name, value in given.items() if name not in fresh}
            for i in range(most):
                table = page_table[:, i * size // page : (i + 1) * size // page].contiguous()
                lens = (whole > i).to(seq_lens.dtype) * size
                theirs = tables.changed(page_table=table, seq_lens=lens, max_seqlen_k=size)
                parts.append(chunk.forward(*tensors, tables=theirs, **kept))
            return merged(request, parts, sinks, out)

        return Bound(forward, traceable=last.traceable and chunk.traceable)
