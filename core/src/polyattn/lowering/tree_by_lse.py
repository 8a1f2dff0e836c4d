"""`tree_by_lse`: drafts in a tree by a kernel that knows no masks: their prefix, and the tree beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound, PagedTables
from ..contract.request import changed
from .base import CALL, Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TreeByLSE"]


class TreeByLSE(Lowering):
    """Every draft sees the whole prefix: that part needs no mask, and the kernel serves it. Among themselves drafts see
    what the mask says: that part is small, dense, and anybody's. Both are merged by their LSE (S6, S8).

    The rows of drafts may differ between sequences: in the dense part they are padded to the longest.
    """

    name = "tree_by_lse"
    summary = "the prefix without a mask, the drafts by a small dense call under theirs, merged by LSE"
    fields = frozenset({"tree", "mask", "spec_topk", "phase", "save_kv_cache"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        bounded = request.window != (-1, -1) or request.chunk or request.causal == "top_left" or request.alibi
        if not request.tree or request.family not in ("paged", "mla") or request.mask == "additive" or bounded:
            return
        if request.kv_parts or request.chunked_prefix:
            return
        part = changed(request, tree=False, causal="none", lse=True, sinks=False, spec_topk=0, save_kv_cache=None)
        # A prefix may be shorter than the drafts after it.
        prefix = changed(part, phase="extend", s_relation="more", mask="none")
        drafts = changed(
            part,
            family="dense",
            phase="prefill",
            layout="BSHD",
            s_relation="equal",
            mask="bool",
            scale=request.softmax_scale,
            kv_dtype="auto",
            kv_layout="",
            kv_scales="",
            page_size=0,
            large=False,
            zero_size=False,
        )
        # Queries and both outputs, each padded or packed, and merged.
        yield Rewrite((prefix,), CALL + 7.0, (drafts,), "prefix and drafts apart")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch

        from .pages import Pool, Tokens, from_column, merged

        kernel, dense = inner[0], helpers[0]
        scales = ("k_scale", "v_scale")

        def forward(
            query: Tensor,
            *caches: Tensor,
            tables: PagedTables,
            attn_mask: Tensor,
            key: Tensor | None = None,
            value: Tensor | None = None,
            sinks: Tensor | None = None,
            out: Tensor | None = None,
            **given: Any,
        ) -> Any:
            page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = tables[:5]
            drafts = cu_seqlens_q.diff()
            prefix_lens = (seq_lens - drafts).clamp(min=0)
            parts = [kernel.forward(query, *caches, tables=tables.changed(seq_lens=prefix_lens), **given)]
            if not (query.shape[0] and max_seqlen_k):
                return merged(request, parts, sinks, out)

            tokens = Tokens.of(query, tables)
            slots = tokens.slots(page_table, request.page_size)
            rows = []
            for cache, new, scale in zip(caches, (key, value), scales, strict=False):
                pool = Pool(request, cache, given.get(scale))
                if new is not None and request.save_kv_cache:
                    pool.write(slots, new)
                rows.append(pool.rows(slots, query.dtype, new))
            if request.family == "mla":
                rows.append(rows[0][..., : request.dims[1]])

            # [N, S]: the token of each padded row; rows past the end and of padding sequences are 0.
            row = torch.arange(max_seqlen_q, dtype=torch.int32, device=query.device)
            index = (cu_seqlens_q[:-1, None] + row).clamp(max=query.shape[0] - 1)
            there = (row < drafts[:, None]) & (seq_lens > 0)[:, None]
            queries, keys, values = (t[index].masked_fill(~there[..., None, None], 0) for t in (query, *rows))
            seen = from_column(attn_mask.expand(index.shape[0], -1, -1, -1), prefix_lens, max_seqlen_q)
            seen = seen & there[:, None, None, :]
            if request.causal != "none":
                seen = seen.tril()
            padded = dense.forward(queries, keys, values, attn_mask=seen)
            parts.append(tuple(part[tokens.sequence, tokens.row] for part in padded))
            return merged(request, parts, sinks, out)

        return Bound(forward, traceable=kernel.traceable)
