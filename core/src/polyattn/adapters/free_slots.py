"""Free slots of a cache: a sequence's last page has some, which may hold anything (S9), NaN and infinities included.

Some kernels multiply them by a weight of 0, which is not enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import AttentionRequest
from ..semantics.paged_kv import owned

__all__ = ["without_free_slots"]


def without_free_slots(
    request: AttentionRequest, caches: tuple[Tensor, ...], page_table: Tensor, seq_lens: Tensor, max_seqlen_k: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """(copies of the pages in the table, zeros in slots that are no token's; their table)."""
    size = request.page_size
    pages = owned(page_table, seq_lens, size, max_seqlen_k)
    table = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device).view(pages.shape)
    slot = torch.arange(pages.shape[1] * size, device=pages.device)
    free = (slot >= seq_lens[:, None]).view(-1, size)
    free = free[:, None, :, None] if request.kv_layout == "HND" else free[:, :, None, None]
    return tuple(_zeroed(cache[pages.flatten()], free) for cache in caches), table


def _zeroed(rows: Tensor, free: Tensor) -> Tensor:
    # Not every device fills FP8; the byte 0 is 0 in all of them.
    (rows.view(torch.uint8) if rows.itemsize == 1 else rows).masked_fill_(free, 0)
    return rows
