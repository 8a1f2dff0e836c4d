"""What backends read of a step beyond its tables: each made on first use, on the device, in place, without a sync.

Every function writes one view of a step into memory that is kept, and returns it. Nothing is allocated once that memory
is there, and no shape depends on what is in a tensor, so that a graph may record all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .tree import write_attn_mask

if TYPE_CHECKING:
    from .metadata import Step

__all__ = ["OF_LENGTHS", "VIEWS"]

_INT = torch.int32


def _summed(step: Step, name: str, lengths: Tensor) -> Tensor:
    """int32 [N+1], 0 and the sums of `lengths` [N]. Nobody writes the 0."""
    out = step.take(name, _INT, step.sequences + 1)
    torch.cumsum(lengths, 0, dtype=_INT, out=out[1:])
    return out


def page_counts(step: Step) -> Tensor:
    out = step.take("page_counts", _INT, step.sequences)
    torch.add(step.seq_lens, step.page_size - 1, out=out)
    return out.div_(step.page_size, rounding_mode="floor")


def cu_seqlens_k(step: Step) -> Tensor:
    return _summed(step, "cu_seqlens_k", step.seq_lens)


def kv_indptr(step: Step) -> Tensor:
    return _summed(step, "kv_indptr", step.page_counts)


def last_page_len(step: Step) -> Tensor:
    out = step.take("last_page_len", _INT, step.sequences)
    torch.sub(step.seq_lens, step.page_counts, alpha=step.page_size, out=out).add_(step.page_size)
    # A row without keys has no last page.
    return torch.minimum(out, step.seq_lens, out=out)


def kv_indices(step: Step) -> Tensor:
    count, columns, N = step.page_entries, step.page_table.shape[1], step.sequences
    out, where, row = (
        step.take(name, _INT, *count).view(-1) for name in ("kv_indices", "kv_index_places", "kv_index_rows")
    )
    place, indptr = step.counting(out.shape[0]), step.kv_indptr
    # Entry i is in the row n of which i is at or after indptr[n]: column i - indptr[n] of row n.
    torch.searchsorted(indptr[1:], place, right=True, out_int32=True, out=row)
    start = step.take("kv_index_starts", _INT, N)
    torch.mul(step.counting(N), columns, out=start).sub_(indptr[:-1])
    bounded = step.fixed or step.stale
    if bounded:
        # There is room past the last entry. What is written there are pages too, and nobody reads them.
        row.clamp_(max=max(N - 1, 0))
    torch.index_select(start, 0, row, out=where).add_(place)
    if bounded:
        where.clamp_(0, max(N * columns - 1, 0))
    return torch.index_select(step.page_table.view(-1), 0, where, out=out)


def attn_mask(step: Step) -> Tensor:
    tree: Tensor = step.tree_mask  # type: ignore[assignment]
    N, N_d = step.sequences, tree.shape[1]
    near, columns = step.take("draft_places", _INT, N, N_d), step.take("draft_columns", torch.int64, N, N_d)
    first = step.take("draft_first", _INT, N)
    torch.sub(step.seq_lens, N_d, out=first).clamp_(0, step.max_seqlen_k - N_d)
    columns.copy_(torch.add(first[:, None], step.counting(N_d), out=near))
    out = step.take("attn_mask", torch.bool, N, 1, N_d, step.max_seqlen_k)
    return write_attn_mask(out, tree, columns)


VIEWS: Mapping[str, Callable[[Step], Tensor]] = {
    "cu_seqlens_k": cu_seqlens_k,
    "page_counts": page_counts,
    "kv_indptr": kv_indptr,
    "kv_indices": kv_indices,
    "last_page_len": last_page_len,
    "attn_mask": attn_mask,
}
"""By name, each after those that it reads."""

OF_LENGTHS = ("cu_seqlens_k", "attn_mask")
"""Those that do not depend on the pages."""
