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
    """Put the new rows of the query tokens into pages, for a kernel that reads all keys from pages.

    Args:
        request: with `save_kv_cache` the caches are written to; without it copies of the call's pages are.
        query: [T_q, H_q, D]. caches: key and value pool, or the pool of latent rows. tables: of the call.
        new: for each cache its rows [T_q, H_kv, D | D_v], or None.

    Returns:
        (caches, their tables) that hold the new rows too.
    """
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
