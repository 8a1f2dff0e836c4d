"""Rows of the query tokens, for kernels that read all keys and values from pages (S9)."""

from __future__ import annotations

from torch import Tensor

from ..contract import AttentionRequest, PagedTables
from ..semantics.paged_kv import Pool, Tokens, owned, renumbered
from .gather_kv import write_new_kv

__all__ = ["append_new_kv"]


def append_new_kv(
    request: AttentionRequest,
    query: Tensor,
    caches: tuple[Tensor, ...],
    tables: PagedTables,
    *new: Tensor | None,
) -> tuple[tuple[Tensor, ...], PagedTables]:
    """(caches, their tables) that hold the rows of the query tokens too. Without `save_kv_cache` they are copies of the
    pages in the table."""
    tokens, size = Tokens.of(query, tables), request.page_size
    if request.save_kv_cache:
        write_new_kv(request, caches, tokens.slots(tables.page_table, size), new)
        return caches, tables
    pages = owned(tables, size)
    table = renumbered(pages)
    caches = tuple(cache[pages.flatten()] for cache in caches)
    for cache, rows in zip(caches, new, strict=True):
        if rows is not None:
            Pool(request, cache).write(tokens.slots(table, size), rows)
    return caches, tables.changed(page_table=table)
