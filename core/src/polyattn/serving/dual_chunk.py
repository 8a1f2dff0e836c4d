"""This module says which positions a layer of dual chunk attention gives its queries and keys (arXiv 2402.17463, and
2501.15383 of the Qwen 1M models)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..contract import scalars
from ..errors import InvalidInputError, did_you_mean

__all__ = ["DUAL_CHUNK_BACKEND", "PARTS", "DualChunk"]

DUAL_CHUNK_BACKEND = "dual_chunk_flash_attn"
"""The backend that serves layers of dual chunk attention, and no others. Any other with an LSE serves them too."""

PARTS = ("intra", "succ", "inter")
"""The three calls: over the keys of the query's own chunk, of the one before it, and of all before that one."""


@dataclasses.dataclass(frozen=True)
class DualChunk:
    """Describes the chunks of a layer: no key and no query is ever at a position above `chunk_size`.

    With L = chunk_size - local_size, the key of token j is at position j mod L. The query of token i is at i mod L for
    the keys of its own chunk, at min(i mod L + L, chunk_size) for those of the chunk before it, and at
    min(2 L - 1, chunk_size) for all earlier ones; one softmax goes over all of them.

    Attributes:
        chunk_size: tokens that the model was trained for. local_size: how many of them two chunks share.
        original_max_position_embeddings: from this length on, logits are multiplied by f squared, where
            f = 0.1 ln(length / original) + 1 and the length is that of the text up to the query. 0 = never.

    Raises:
        InvalidInputError: sizes that leave no chunk.
    """

    chunk_size: int = 8192
    local_size: int = 1024
    original_max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        for name in ("chunk_size", "local_size", "original_max_position_embeddings"):
            value = getattr(self, name)
            if not scalars.whole(value) or value < 0:
                raise InvalidInputError(
                    f"DualChunk: {name}={scalars.shown(value)}; a whole number of 0 or more is needed"
                )
        if self.length < 1:
            raise InvalidInputError(
                f"DualChunk: chunk_size={self.chunk_size} leaves no keys beside local_size={self.local_size}; a larger "
                f"chunk_size is needed"
            )

    @classmethod
    def from_config(cls, config: Any) -> DualChunk:
        """Read a model's `dual_chunk_attention_config`.

        Raises:
            InvalidInputError: words that are not known, or sparse attention within the chunks, which nobody has here.
        """
        given = dict(config)
        if given.pop("sparse_attention_enabled", "sparse_attention_config" in given):
            raise InvalidInputError(
                "dual_chunk_attention_config asks for sparse_attention_enabled=True; chunks are served dense: set "
                "sparse_attention_enabled to False"
            )
        for name in ("sparse_attention_config", "sparse_attention_threshold", "sparse_attention_last_q"):
            given.pop(name, None)
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            near = did_you_mean(unknown[0], known)
            raise InvalidInputError(
                f"dual_chunk_attention_config has {unknown[0]!r}; known are {', '.join(known)}.{near}"
            )
        return cls(**given)

    @property
    def length(self) -> int:
        """L, the tokens of a chunk."""
        return self.chunk_size - self.local_size

    def positions(self, positions: Tensor) -> Tensor:
        """Return where keys, and the queries of `intra`, are: int64 [T] of positions in the text, int64 [T]."""
        return positions % self.length

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return how much further the queries of `succ` and of `inter` are than those of `intra`: int64 [T] each."""
        own = self.positions(positions)
        succ = (own + self.length).clamp(max=self.chunk_size)
        return succ - own, min(2 * self.length - 1, self.chunk_size) - own

    def factor(self, positions: Tensor) -> Tensor | None:
        """Return what the logits of each query are multiplied by, float64 [T], None = nothing."""
        if not self.original_max_position_embeddings:
            return None
        ratio = (positions + 1).double() / self.original_max_position_embeddings
        return torch.log(ratio).mul_(0.1).add_(1.0).clamp_(min=1.0).square_()
