"""`finer_pages`: a cache in pages of P by a kernel of smaller ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..adapters.pages import cut_pages
from ..contract import AttentionRequest, Bound, PagedTables
from ..contract.request import changed
from .base import Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FinerPages", "by_size"]

_SCALES = ("k_scale", "v_scale")


def by_size(request: AttentionRequest, sizes: Iterable[int]) -> Iterable[Rewrite]:
    """Rewrites of a request to pages of these sizes, which divide its own."""
    # In HND the tokens of a page lie in one run per head: no smaller page of all heads is a view.
    viewable = request.family == "mla" or (request.family == "paged" and request.kv_layout in ("", "NHD"))
    if viewable and not request.kv_parts:
        for size in sizes:
            inner = changed(request, page_size=size)
            # Of tensors only the table is written. Shorter runs of rows cost a kernel a little.
            yield Rewrite((inner,), 0.5 / size, detail=f"pages of {request.page_size} -> {size}")


class FinerPages(Lowering):
    """Page i of P tokens is pages i * P/p, i * P/p + 1 ... of p tokens, in the same memory."""

    name: ClassVar[str] = "finer_pages"
    summary: ClassVar[str] = "the pages are cut into smaller ones by views, and the table with them"
    fields = frozenset({"page_size"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        P = request.page_size
        return by_size(request, (size for size in range(P // 2, 1, -1) if P % size == 0))

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch

        kernel, P, p = inner[0], request.page_size, rewrite.inner[0].page_size
        names = ("key_cache", "value_cache") if request.family == "paged" else ("cache",)

        def forward(query: Tensor, *caches: Tensor, tables: PagedTables, **given: Any) -> Any:
            pools: dict[str, Tensor] = dict(zip(names, caches, strict=True))
            if request.kv_scales in ("token", "block16"):
                pools |= {name: given[name] for name in _SCALES}
            cut, step = cut_pages(pools, P, p)
            given |= {name: cut.pop(name) for name in _SCALES if name in cut}
            table = tables.page_table[:, : max(-(-tables.max_seqlen_k // P), 1)].unsqueeze(-1) * step
            table = (table + torch.arange(P // p, dtype=table.dtype, device=table.device)).flatten(1)
            return kernel.forward(query, *cut.values(), tables=tables.changed(page_table=table), **given)

        return Bound(forward, traceable=kernel.traceable)
