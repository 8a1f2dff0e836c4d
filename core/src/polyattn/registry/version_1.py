"""Plugins that speak version 1 of the contract, as version 2 calls them.

Version 1 gave the tables of a paged or latent call as five keywords, version 2 gives one `PagedTables`. Nothing else
differs, so dense plugins of version 1 need nothing of this.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ..contract import Bound, PagedTables, Session, Slot

__all__ = ["FAMILIES", "TABLES", "as_version_2"]

FAMILIES = ("paged", "mla")
"""Families whose calls read tables."""
TABLES = ("page_table", "seq_lens", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")
"""The keywords of version 1, which a later field of `PagedTables` does not join."""


def as_version_2(bound: Bound) -> Bound:
    """A paged or latent `Bound` of version 1, called with `tables`."""
    session = None if bound.session is None else functools.partial(_Session, bound.session)
    return dataclasses.replace(bound, forward=_spread(bound.forward), session=session)


def _spread(forward: Callable[..., Any]) -> Callable[..., Any]:
    def spread(*tensors: Any, tables: PagedTables, **keywords: Any) -> Any:
        page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = tables[:5]
        return forward(
            *tensors, page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, **keywords,
        )  # fmt: skip

    return spread


class _Session:
    """A session of version 1: it plans and prepares as it did."""

    def __init__(self, make: Callable[[Slot], Any], slot: Slot) -> None:
        inner: Session = make(slot)
        self.plan, self.prepare, self.forward = inner.plan, inner.prepare, _spread(inner.forward)
