"""`page_table_to_tokens`: a cache in pages by a kernel that finds each token by itself."""

from __future__ import annotations

from collections.abc import Iterable

from ..contract import AttentionRequest
from .base import Rewrite
from .finer_pages import FinerPages, by_size

__all__ = ["PageTableToTokens"]


class PageTableToTokens(FinerPages):
    """Pages of one token."""

    name = "page_table_to_tokens"
    summary = "every token becomes a page, by a view, and the table with them"

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        return by_size(request, (1,) if request.page_size > 1 else ())
