"""Mistakes of kernels from one tile of keys to the next, planted in the reference.

Within `in_tiles`, the reference computes what a kernel computes that reads keys in tiles and is right but for one
mistake. With one tile there is nothing to be wrong with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..semantics.reference import dense, visible

__all__ = ["FAULTS", "TILES", "in_tiles"]

TILES = (128, 256)
"""Keys, and queries, of a tile: what kernels have most."""

FAULTS: Mapping[str, str] = {
    "no_rescale": "what was summed before is not rescaled when the maximum grows",
    "lost_tail": "the last one is dropped where there are several",
    "late_window": "those of a window begin one tile too late",
    "lost_dv": "the second one has no gradient of V",
}
"""Each mistake by name."""


@contextlib.contextmanager
def in_tiles(tile: int, fault: str) -> Iterator[None]:
    """Within: the reference reads keys in tiles of this many and makes this mistake; "" for none."""
    right = dense._attend

    def attend(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, **options: Any) -> Any:
        if k.shape[2] <= tile:
            return right(q, k, v, attn_mask=attn_mask, **options)
        if fault == "lost_dv":
            v = torch.cat([v[:, :, :tile], v[:, :, tile : 2 * tile].detach(), v[:, :, 2 * tile :]], 2)
        elif fault == "no_rescale":
            attn_mask = _unscaled(q, k, attn_mask, tile, options)
        elif fault:
            kept = _kept(fault, tile, q.shape[2], k.shape[2], options).to(q.device)
            attn_mask = kept[None, None] if attn_mask is None else _both(attn_mask, kept)
        return right(q, k, v, attn_mask=attn_mask, **options)

    with mock.patch.object(dense, "_attend", attend):
        yield


def _both(mask: Tensor, kept: Tensor) -> Tensor:
    return mask & kept if mask.dtype == torch.bool else mask.masked_fill(~kept, float("-inf"))


def _kept(fault: str, tile: int, s_q: int, s_k: int, options: Mapping[str, Any]) -> Tensor:
    """The keys that a query reads: bool [S_q, S_k]."""
    key = torch.arange(s_k)[None, :]
    if fault == "lost_tail":
        return (key < (s_k - 1) // tile * tile).expand(s_q, -1)
    left = options["window"][0]
    if left < 0:
        return torch.ones(s_q, s_k, dtype=torch.bool)
    first = torch.arange(s_q)[:, None] // tile * tile + options["q_offset"]
    kept: Tensor = key >= ((first - left).div(tile, rounding_mode="floor") + 1).clamp(min=0) * tile
    return kept


def _unscaled(q: Tensor, k: Tensor, mask: Tensor | None, tile: int, options: Mapping[str, Any]) -> Tensor:
    """The mask with what each tile weighs too much, as it was summed before the maximum grew: [B, H_q, S_q, S_k]."""
    with torch.no_grad():
        logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * options["scale"]
        if options["softcap"]:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        if mask is not None and mask.dtype != torch.bool:
            logits = logits + mask
        elif mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        rules = {name: options[name] for name in ("causal", "window", "chunk", "q_offset")}
        seen = visible(q.shape[2], k.shape[2], **rules, device=q.device)
        if seen is not None:
            logits = logits.masked_fill(~seen, float("-inf"))
        tops = torch.stack([part.amax(-1) for part in logits.split(tile, -1)], -1).cummax(-1).values
        late = (tops[..., -1:] - tops).repeat_interleave(tile, -1)[..., : k.shape[2]]
        # Where nothing was seen yet nothing was summed.
        late = late.masked_fill(~late.isfinite(), 0.0)
    if mask is not None and mask.dtype == torch.bool:
        return late.masked_fill(~mask, float("-inf"))
    return late if mask is None else late + mask
