"""`write_new_rows`: new keys and values by a kernel that only reads its cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract import AttentionRequest, Bound, PagedTables
from ..contract.request import changed
from .base import Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WriteNewRows"]

_LAYOUTS = ("", "NHD", "HND")
"""Those in which the row of a token is a place of its own."""


class WriteNewRows(Lowering):
    """The kernel finds the rows of the query tokens in the cache, rounded as the cache rounds them (S9).

    With `save_kv_cache` they are stored in the caller's cache first. Without, that one is left as it is: the pages in
    the table are copied, and the rows are written into the copy.
    """

    name = "write_new_rows"
    summary = "new keys and values are written first, into the cache or into a copy of the pages in the table"
    fields = frozenset({"save_kv_cache"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        saved = request.save_kv_cache
        # The new keys of cross-attention are not those of the query tokens.
        if saved is None or request.family != "paged" or request.cross or request.kv_layout not in _LAYOUTS:
            return
        if not saved and request.kv_parts:  # parts without a pool of their own are in the call's, which is not copied
            return
        plain = changed(request, save_kv_cache=None)
        # Of K and V each the rows are read and written; or all pages, beside which the rows are few.
        cost, into = (2.0, "the cache") if saved else (4.0, "a copy of the pages in the table")
        yield Rewrite((plain,), cost, detail=f"new keys and values into {into}, before the kernel reads it")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        from .lengths import check_size
        from .pages import Pool, Tokens, owned, renumbered

        kernel, size = inner[0], request.page_size
        width = request.kv_heads * max(request.dims)
        scales = ("k_scale", "v_scale")
        per_token = request.kv_scales in ("token", "block16")

        def forward(
            query: Tensor,
            *caches: Tensor,
            tables: PagedTables,
            key: Tensor,
            value: Tensor,
            **given: Any,
        ) -> Any:
            if not request.save_kv_cache:
                pages = owned(tables, size)
                check_size(request, "copying the pages", pages.numel() * size * width)
                tables = tables.changed(page_table=renumbered(pages))
                caches = tuple(cache[pages.flatten()] for cache in caches)
                if per_token:
                    given |= {name: given[name][pages.flatten()] for name in scales}
            slots = Tokens.of(query, tables).slots(tables.page_table, size)
            for cache, new, scale in zip(caches, (key, value), scales, strict=True):
                Pool(request, cache, given.get(scale)).write(slots, new)
            return kernel.forward(query, *caches, tables=tables, **given)

        return Bound(forward, traceable=kernel.traceable)
