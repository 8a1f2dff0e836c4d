"""A cache of single-token pages whose sequences begin later: tables are moved, nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract import Bound

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
            given["attn_mask"] = _columns(rows, first[:, None, None], longest)
        table = _columns(page_table, first, count)
        return kernel.forward(*tensors, page_table=table, seq_lens=kept, max_seqlen_k=longest, **given)

    return Bound(forward, traceable=kernel.traceable)


def _columns(table: Tensor, first: Tensor, count: int) -> Tensor:
    """Up to `count` columns of `table` [..., columns], from column `first` [...] on.

    `first` is 0 where a sequence has no more than `count` tokens, and they end within the table where it has.
    """
    columns = torch.arange(min(count, table.shape[-1]), device=table.device) + first.unsqueeze(-1)
    return table.gather(-1, columns.expand(*table.shape[:-1], -1))
