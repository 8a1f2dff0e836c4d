"""Packed sequences in the rows of a batch, and back, without a word to the host."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..semantics.packed import sequence_ids

__all__ = ["Padded"]


@dataclasses.dataclass(frozen=True)
class Padded:
    """Holds one side of a packed call.

    Attributes:
        lengths: [N]. longest: L, a row's length. places: int64 [T], of each token in [N * L].
    """

    lengths: Tensor
    longest: int
    places: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, tokens: int, longest: int) -> Padded:
        """Build the padding of `tokens` tokens; N and L are at least 1, so that no padded tensor is empty."""
        if cu_seqlens.shape[0] == 1:
            cu_seqlens = cu_seqlens.expand(2)
        longest = max(longest, 1)
        token = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        sequence = sequence_ids(tokens, cu_seqlens)
        return cls(cu_seqlens.diff(), longest, sequence * longest + token - cu_seqlens[sequence])

    @property
    def rows(self) -> int:
        """N * L."""
        return self.lengths.shape[0] * self.longest

    def spread(self, tensor: Tensor, value: float = 0.0) -> Tensor:
        """[T, ...] -> [N, L, ...], with `value` behind each sequence."""
        empty = tensor.new_full((self.rows, *tensor.shape[1:]), value)
        # Each token has a place of its own: the gradient of this is a gather, and nothing is added up.
        return torch.unflatten(empty.index_copy(0, self.places, tensor), 0, (-1, self.longest))

    def collect(self, padded: Tensor) -> Tensor:
        """[N, L, ...] -> [T, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places)

    def inside(self) -> Tensor:
        """bool [N, L], True for tokens and False for the padding."""
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths[:, None]
