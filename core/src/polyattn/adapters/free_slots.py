"""Free slots of a cache: a sequence's last page has some, which may hold anything (S9), NaN and infinities included.

Some kernels multiply them by a weight of 0, which is not enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import AttentionRequest, PagedTables
from ..semantics.paged_kv import owned, renumbered

__all__ = ["without_free_slots"]


def without_free_slots(
    request: AttentionRequest, caches: tuple[Tensor, ...], tables: PagedTables
) -> tuple[tuple[Tensor, ...], PagedTables]:
    """(copies of the pages in the table, zeros in slots that are no token's; the tables of the copies)."""
    size = request.page_size
    pages = owned(tables, size)
    slot = torch.arange(pages.shape[1] * size, device=pages.device)
    free = (slot >= tables.seq_lens[:, None]).view(-1, size)
    free = free[:, None, :, None] if request.kv_layout == "HND" else free[:, :, None, None]
    copies = tuple(_zeroed(cache[pages.flatten()], free) for cache in caches)
    return copies, tables.changed(page_table=renumbered(pages))


def _zeroed(rows: Tensor, free: Tensor) -> Tensor:
    # Not every device fills FP8; the byte 0 is 0 in all of them.
    (rows.view(torch.uint8) if rows.itemsize == 1 else rows).masked_fill_(free, 0)
    return rows
