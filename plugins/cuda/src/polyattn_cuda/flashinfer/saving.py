"""New keys and values into the pages of a planned step: FlashInfer's kernels write none themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Slot
from polyattn.semantics.kv_quant import stored

__all__ = ["Places"]


class Places:
    """Where the new tokens of a step go, in the memory of a session."""

    def __init__(self, request: AttentionRequest, slot: Slot) -> None:
        self._size, self._first = request.page_size, 1 if request.kv_layout == "HND" else 0
        both = slot.workspace("new tokens", 16 * slot.max_tokens).view(torch.int64)
        self._page, self._place = both.view(2, slot.max_tokens)
        self._where = self._page, self._place

    @classmethod
    def of(cls, request: AttentionRequest, slot: Slot) -> Places | None:
        """None where the kernel's calls bring no rows that are to be kept."""
        return cls(request, slot) if request.save_kv_cache and request.family == "paged" else None

    def take(self, step: Any) -> None:
        """Those of a step; recorded with it."""
        slots = step.slots
        self._where = page, place = self._page[: slots.shape[0]], self._place[: slots.shape[0]]
        torch.div(slots, self._size, rounding_mode="floor", out=page)
        torch.remainder(slots, self._size, out=place)

    def write(
        self, caches: Sequence[Tensor], new: Sequence[Tensor | None], scales: Sequence[Tensor | None] = (None, None)
    ) -> None:
        """Store rows [T_q, H_kv, D], rounded as the cache rounds them."""
        for cache, rows, scale in zip(caches, new, scales, strict=True):
            if rows is None:
                continue
            kept = stored(rows, None if scale is None else scale.reshape(1), cache.dtype)
            if cache.dtype.itemsize == 1:
                cache, kept = cache.view(torch.uint8), kept.view(torch.uint8)
            (cache.transpose(1, 2) if self._first else cache)[self._where] = kept
