"""This module computes what backends read of a step beyond its tables: each made on first use, on the device, in place,
without a sync.

A view has memory of its step, which is kept, and a function that writes it. Nothing is allocated to write one and no
shape depends on what is in a tensor, so that a graph may record all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .tree import write_attn_mask

if TYPE_CHECKING:
    from .step_metadata import Step

__all__ = ["OF_LENGTHS", "VIEWS", "View"]

_INT = torch.int32


class View(NamedTuple):
    """shape: of its memory. write: into it; it is given flat where `flat`."""

    shape: Callable[[Step], tuple[int, ...]]
    write: Callable[[Step, Tensor], object]
    dtype: torch.dtype = _INT
    flat: bool = False

    def memory(self, step: Step, name: str) -> Tensor:
        """Return the memory of a step, with what was there before."""
        taken = step.take(name, self.dtype, *self.shape(step))
        return taken.view(-1) if self.flat else taken


def _rows(step: Step) -> tuple[int, ...]:
    return (step.sequences,)


def _ends(step: Step) -> tuple[int, ...]:
    return (step.sequences + 1,)


def _page_counts(step: Step, out: Tensor) -> None:
    torch.add(step.seq_lens, step.page_size - 1, out=out)
    out.div_(step.page_size, rounding_mode="floor")


def _summed(lengths: Tensor, out: Tensor) -> None:
    """0 and the sums of `lengths` [N]. Nobody writes the 0."""
    torch.cumsum(lengths, 0, dtype=_INT, out=out[1:])


def _last_page_len(step: Step, out: Tensor) -> None:
    torch.sub(step.seq_lens, step.page_counts, alpha=step.page_size, out=out).add_(step.page_size)
    # A row without keys has no last page.
    torch.minimum(out, step.seq_lens, out=out)


def _kv_indices(step: Step, out: Tensor) -> None:
    count, columns, N = step.page_entries, step.page_table.shape[1], step.sequences
    where, row = (step.take(name, _INT, *count).view(-1) for name in ("kv_index_places", "kv_index_rows"))
    place, indptr = step.counting(out.shape[0]), step.kv_indptr
    # Entry i is in the row n of which i is at or after indptr[n]: column i - indptr[n] of row n.
    torch.searchsorted(indptr[1:], place, right=True, out_int32=True, out=row)
    start = step.take("kv_index_starts", _INT, N)
    torch.mul(step.counting(N), columns, out=start).sub_(indptr[:-1])
    if step.fixed:
        # There is room past the last entry. What is written there are pages too, and nobody reads them.
        row.clamp_(max=max(N - 1, 0))
    torch.index_select(start, 0, row, out=where).add_(place)
    if step.fixed:
        where.clamp_(0, max(N * columns - 1, 0))
    torch.index_select(step.page_table.view(-1), 0, where, out=out)


def _attn_mask(step: Step, out: Tensor) -> None:
    tree: Tensor = step.tree_mask  # type: ignore[assignment]
    N, N_d = step.sequences, tree.shape[1]
    near, columns = step.take("draft_places", _INT, N, N_d), step.take("draft_columns", torch.int64, N, N_d)
    first = step.take("draft_first", _INT, N)
    torch.sub(step.seq_lens, N_d, out=first).clamp_(0, step.max_seqlen_k - N_d)
    columns.copy_(torch.add(first[:, None], step.counting(N_d), out=near))
    write_attn_mask(out, tree, columns)


def _mask_shape(step: Step) -> tuple[int, ...]:
    N_d = step.tree_mask.shape[1]  # type: ignore[union-attr]
    return step.sequences, 1, N_d, step.max_seqlen_k


def _state_slots(step: Step, out: Tensor) -> None:
    rows, live = step.requests
    torch.add(rows, 1, out=out).mul_(live).sub_(1)


VIEWS: Mapping[str, View] = {
    "cu_seqlens_k": View(_ends, lambda step, out: _summed(step.seq_lens, out)),
    "page_counts": View(_rows, _page_counts),
    "kv_indptr": View(_ends, lambda step, out: _summed(step.page_counts, out)),
    "kv_indices": View(lambda step: step.page_entries, _kv_indices, flat=True),
    "last_page_len": View(_rows, _last_page_len),
    "attn_mask": View(_mask_shape, _attn_mask, torch.bool),
    "state_slots": View(_rows, _state_slots, torch.int64),
}
"""By name, each after those that it reads."""

OF_LENGTHS = ("cu_seqlens_k", "attn_mask", "state_slots")
"""Those that do not depend on the pages."""
