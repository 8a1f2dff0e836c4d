"""A model that costs nothing: what an engine spends beside it is the engine's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.serving import AttentionLayer

VOCAB = 64


class IdleModel:
    """A `polyattn.serving.engine.Runner` whose next token follows from the last one and its place; nothing attends.

    Args:
        windows: of its layers, -1 = full attention.
    """

    dtype, device, vocab_size, max_positions = torch.float32, torch.device("cpu"), VOCAB, 0

    def __init__(self, windows: Sequence[int] = (-1,)) -> None:
        self.layers = [AttentionLayer(i, 1, 1, 16, window=window) for i, window in enumerate(windows)]
        self._logits = torch.eye(VOCAB)

    def serve(self, backend: Any) -> Any:
        def forward(ids: Tensor, positions: Tensor, keep: Tensor | None, batch: Any, steps: Any) -> Tensor:
            if keep is not None:
                ids, positions = ids[keep], positions[keep]
            return self._logits[(5 * ids + positions) % VOCAB]

        return forward
