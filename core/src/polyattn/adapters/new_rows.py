"""Rows of the query tokens, for kernels that read all keys and values from pages (S9)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import AttentionRequest
from ..semantics.paged_kv import Pool, Tokens, owned
from .gather_kv import store

__all__ = ["with_new"]


def with_new(
    request: AttentionRequest,
    query: Tensor,
    caches: tuple[Tensor, ...],
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    *new: Tensor | None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """(caches, table) that hold the rows of the query tokens too. Without `save_kv_cache` they are copies of the pages
    in the table."""
    tokens, size = Tokens.of(query, seq_lens, cu_seqlens_q), request.page_size
    if request.save_kv_cache:
        store(request, caches, tokens.slots(page_table, size), new)
        return caches, page_table
    pages = owned(page_table, seq_lens, size, max_seqlen_k)
    table = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device).view(pages.shape)
    caches = tuple(cache[pages.flatten()] for cache in caches)
    for cache, rows in zip(caches, new, strict=True):
        if rows is not None:
            Pool(request, cache).write(tokens.slots(table, size), rows)
    return caches, table
