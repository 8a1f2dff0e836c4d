"""A cache of single-token pages whose sequences begin later: tables are moved, nothing is copied."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..contract import Bound, PagedTables
from .pages import from_column

__all__ = ["last_tokens"]


def last_tokens(kernel: Bound, count: int) -> Bound:
    """A paged or latent kernel that is shown the last `count` tokens of each sequence."""

    def forward(
        *tensors: Tensor,
        tables: PagedTables,
        attn_mask: Tensor | None = None,
        **given: Any,
    ) -> Any:
        page_table, seq_lens = tables.page_table, tables.seq_lens
        kept = seq_lens.clamp(max=count)
        first, longest = seq_lens - kept, min(tables.max_seqlen_k, count)
        if attn_mask is not None:
            rows = attn_mask.expand(page_table.shape[0], -1, -1, -1)
            given["attn_mask"] = from_column(rows, first, min(longest, rows.shape[-1]))
        table = from_column(page_table, first, min(count, page_table.shape[1]))
        last = tables.changed(page_table=table, seq_lens=kept, max_seqlen_k=longest)
        return kernel.forward(*tensors, tables=last, **given)

    return Bound(forward, traceable=kernel.traceable)
