"""Which keys a query sees, as the operators are told: a mode, a mask in which True hides, bounds of a band.

Without a mask they ignore mode and bounds, and attend to everything. Modes 2, 3 and 4 take one mask for all lengths, of
2048 x 2048, which is the pattern of a tile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest

__all__ = ["UNBOUNDED", "Sparsity", "blind_rows", "by_position"]

UNBOUNDED = 2**31 - 1
_TILE = 2048

WHOLE, UPPER_LEFT, LOWER_RIGHT, BAND = 1, 2, 3, 4
"""Modes: the mask says it all; causal from a corner; a band whose diagonal ends in the lower right corner."""


class Sparsity(NamedTuple):
    """mask: True hides; None = nothing is hidden. before, after: keys of a band on either side of the diagonal."""

    mode: int = 0
    mask: Tensor | None = None
    before: int = UNBOUNDED
    after: int = UNBOUNDED


@functools.lru_cache(maxsize=8)
def _tile(device: torch.device) -> Tensor:
    return torch.ones(_TILE, _TILE, dtype=torch.bool, device=device).triu(1)


def by_position(request: AttentionRequest, device: torch.device) -> Sparsity | None:
    """The position rule of a request; None where it has no mode of its own: windows along the upper left diagonal."""
    left, right = request.window
    if request.causal == "none" and left < 0 and right < 0:
        return Sparsity()
    if left < 0 and right < 0:
        return Sparsity(UPPER_LEFT if request.causal == "top_left" else LOWER_RIGHT, _tile(device))
    if request.causal == "top_left":
        return None
    after = 0 if request.causal != "none" else right
    return Sparsity(BAND, _tile(device), *(UNBOUNDED if n < 0 else n for n in (left, after)))


def blind_rows(request: AttentionRequest, queries: int, keys: int) -> int:
    """How many of the first queries see no key, by position."""
    if not keys:
        return queries
    right = 0 if request.causal != "none" else request.window[1]
    if request.causal == "top_left" or right < 0:
        return 0
    return min(max(queries - keys - right, 0), queries)
