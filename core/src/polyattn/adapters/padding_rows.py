"""Rows of padding, `seq_lens[n] = 0` with queries (S9), for kernels that cannot take a row without keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..semantics.packed import owners

__all__ = ["blank", "with_keys"]


def with_keys(
    page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """(page_table, seq_lens) in which a row of padding has as many keys as queries, all of page 0. What is computed of
    them has no meaning, see `blank`."""
    padding = seq_lens == 0
    missing = -(-max_seqlen_q // page_size) - page_table.shape[1]
    table = page_table.masked_fill(padding[:, None], 0)
    table = torch.nn.functional.pad(table, (0, missing)) if missing > 0 else table
    return table, torch.where(padding, cu_seqlens_q.diff(), seq_lens)


def blank(tokens: int, seq_lens: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """bool [tokens], the queries of rows of padding."""
    return (seq_lens == 0)[owners(tokens, cu_seqlens_q)]
