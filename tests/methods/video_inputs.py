"""Inputs that the tests of the video methods share."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["tensors"]


def tensors(tokens: int, *, heads: int = 4, kv_heads: int = 4, batch: int = 2, width: int = 16) -> list[Tensor]:
    """(query, key, value) float64 [B, S, H, D]. Keys have a mean, as those of models do."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(batch, tokens, n, width) for n in (heads, kv_heads, kv_heads)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [made[0], made[1] + 0.5, made[2]]
