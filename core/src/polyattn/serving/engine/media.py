"""This module holds what a prompt has beside words: images, whose tokens get their embeddings from a tower."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Insert", "Media", "Span", "beside_words"]

Insert = tuple[list[int], Tensor]
"""Tokens of a step, and their embeddings [R, hidden]."""


@dataclasses.dataclass(eq=False)
class Media:
    """Holds the images of one prompt.

    Attributes:
        inputs: what the runner's `encode` takes.
        at: places of the prompt, ascending, whose embeddings `encode` gives: a row for each.
        keys: the prompt as the prefix cache knows it: its tokens, and in these places numbers that stand for what is
            there. Prompts share pages where they are alike.
        positions: int64 [3, S], on the host: where each token of the prompt is for rotary embeddings, in time, row and
            column. Tokens after the prompt go on in all three.
        features: what `encode` gave, while the prompt is computed.
    """

    inputs: Any
    at: Sequence[int]
    keys: Sequence[int]
    positions: Tensor
    features: Tensor | None = None

    def place(self, start: int, count: int) -> Tensor:
        """Return the positions of so many tokens from `start` on, [3, count]."""
        known, length = self.positions[:, start : start + count], self.positions.shape[1]
        if not (more := count - known.shape[1]):
            return known
        first = int(self.positions.max()) + 1 + max(start - length, 0)
        return torch.cat([known, torch.arange(first, first + more).expand(3, -1)], 1)

    def insert(self, start: int, count: int, before: int, encode: Callable[[Media], Tensor]) -> list[Insert]:
        """Return what stands at so many tokens from `start` on, which are in a step after `before` others."""
        low, high = (bisect.bisect_left(self.at, place) for place in (start, start + count))
        if low == high:
            return []
        if self.features is None:
            self.features = encode(self)
        return [([before + place - start for place in self.at[low:high]], self.features[low:high])]


Span = tuple[Media | None, int, int]
"""The images of a request, the first of its tokens that are in a step, and how many are."""


def beside_words(spans: Sequence[Span], encode: Callable[[Media], Tensor] | None) -> tuple[Tensor | None, list[Insert]]:
    """Return the positions of a step's tokens, int64 [3, T] on the host, None where no request has images; and the
    embeddings that are no words'."""
    positions: list[Tensor] = []
    inserts: list[Insert] = []
    if encode is None or all(media is None for media, _, _ in spans):
        return None, inserts
    before = 0
    for media, start, count in spans:
        if media is None:
            positions.append(torch.arange(start, start + count).expand(3, -1))
        else:
            positions.append(media.place(start, count))
            inserts += media.insert(start, count, before, encode)
        before += count
    return torch.cat(positions, 1), inserts
