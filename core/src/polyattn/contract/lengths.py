"""What the arguments of a bound call say of its shape. Nothing here waits for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .protocols import PagedTables
from .request import AttentionRequest

__all__ = ["Extent", "extent_of", "head_axis"]

Extent = tuple[int, int, int]
"""(B or N, the longest S_q, the longest S_k)."""


def head_axis(request: AttentionRequest) -> int:
    """Axis of H_q in the LSE of a call."""
    return 2 if request.layout == "BSHD" else 1


def extent_of(request: AttentionRequest) -> Callable[..., Extent]:
    """What reads the extent of a call of a request's family from the arguments of `Bound.forward`."""
    if request.family in ("dense", "block_sparse"):
        return _bshd if request.layout == "BSHD" else _bhsd
    return _cached if request.family in ("paged", "mla") else _packed


def _bshd(query: Any, key: Any, *rest: Any, **keywords: Any) -> Extent:
    batch, s_q = query.shape[:2]
    return batch, s_q, key.shape[1]


def _bhsd(query: Any, key: Any, *rest: Any, **keywords: Any) -> Extent:
    batch, _, s_q = query.shape[:3]
    return batch, s_q, key.shape[2]


def _packed(*tensors: Any, cu_seqlens_q: Any, max_seqlen_q: int, max_seqlen_k: int, **keywords: Any) -> Extent:
    return cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k


def _cached(*tensors: Any, tables: PagedTables, **keywords: Any) -> Extent:
    return tables.seq_lens.shape[0], tables.max_seqlen_q, tables.max_seqlen_k
