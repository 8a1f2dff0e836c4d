"""Rows of padding, `seq_lens[n] = 0` with queries (S9), for kernels that cannot take a row without keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import PagedTables
from ..semantics.packed import sequence_ids

__all__ = ["give_padding_a_key", "padding_query_mask"]


def give_padding_a_key(tables: PagedTables, page_size: int) -> PagedTables:
    """Make tables in which a row of padding (`seq_lens[n] = 0`) has as many keys as queries, all of page 0.

    Args:
        tables: of the call. page_size: tokens of a page.

    Returns:
        Tables of the same sequences. What is computed of padding has no meaning: see `padding_query_mask`.
    """
    padding = tables.seq_lens == 0
    missing = -(-tables.max_seqlen_q // page_size) - tables.page_table.shape[1]
    table = tables.page_table.masked_fill(padding[:, None], 0)
    table = torch.nn.functional.pad(table, (0, missing)) if missing > 0 else table
    return tables.changed(page_table=table, seq_lens=torch.where(padding, tables.cu_seqlens_q.diff(), tables.seq_lens))


def padding_query_mask(tokens: int, tables: PagedTables) -> Tensor:
    """Find the queries of rows of padding.

    Args:
        tokens: T_q. tables: of the call, as they were before `give_padding_a_key`.

    Returns:
        bool [T_q], True for a query whose row has no keys: its out is 0 and its LSE -inf.
    """
    return (tables.seq_lens == 0)[sequence_ids(tokens, tables.cu_seqlens_q)]
