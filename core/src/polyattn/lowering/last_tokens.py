"""A cache of single-token pages whose sequences begin later: tables are moved, nothing is copied."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..contract import Bound
from .pages import from_column

__all__ = ["last_tokens"]


def last_tokens(kernel: Bound, count: int) -> Bound:
    """A paged or latent kernel that is shown the last `count` tokens of each sequence."""

    def forward(
        *tensors: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        max_seqlen_k: int,
        attn_mask: Tensor | None = None,
        **given: Any,
    ) -> Any:
        kept = seq_lens.clamp(max=count)
        first, longest = seq_lens - kept, min(max_seqlen_k, count)
        if attn_mask is not None:
            rows = attn_mask.expand(page_table.shape[0], -1, -1, -1)
            given["attn_mask"] = from_column(rows, first, min(longest, rows.shape[-1]))
        table = from_column(page_table, first, min(count, page_table.shape[1]))
        return kernel.forward(*tensors, page_table=table, seq_lens=kept, max_seqlen_k=longest, **given)

    return Bound(forward, traceable=kernel.traceable)
