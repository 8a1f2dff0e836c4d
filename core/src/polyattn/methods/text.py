"""Text of a place that is no padding: what a call that a method makes densely may see."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import Place

__all__ = ["no_padding", "valid_of"]


def valid_of(place: Place) -> tuple[int, int]:
    """(front, back), text tokens of the place that are no padding."""
    return place.text if place.valid_text is None else place.valid_text


def no_padding(place: Place, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Keys and values [B, H, S, D] at a place without text that is padding: views, or copies where it lies between."""
    (front, back), (valid_front, valid_back) = place.text, valid_of(place)
    some = [t[:, :, : t.shape[2] - back + valid_back] for t in tensors]
    if valid_front == front:
        return tuple(some)
    return tuple(torch.cat([t[:, :, :valid_front], t[:, :, front:]], 2) for t in some)
