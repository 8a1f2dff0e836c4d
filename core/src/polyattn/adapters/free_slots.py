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
    """Copy the pages of a call, with zeros in the slots that hold no token.

    Args:
        request: its `page_size` and `kv_layout` say how a page lies.
        caches: [pages, page_size, H_kv, D], or [pages, H_kv, page_size, D] for HND, of any dtype. They are only read.
        tables: of the call.

    Returns:
        (copies of the pages in the table, in its order; tables whose page table numbers the copies).
    """
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
