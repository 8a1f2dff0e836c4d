"""A two-layer language model that is small enough for thousands of requests: its attention is real, the rest is three
matrices. One layer sees everything, one a window, so that the cache has two groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.serving.layer import AttentionLayer

HEADS, KV_HEADS, DIM, VOCAB, WINDOW = 4, 2, 16, 29, 5


class ToyRunner:
    """A `polyattn.serving.engine.Runner`, and the same model without pages (`dense`)."""

    dtype, device, vocab_size = torch.float32, torch.device("cpu"), VOCAB

    def __init__(self, seed: int = 0, positions: int = 256) -> None:
        self.max_positions = positions
        made = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=made) / shape[0] ** 0.5

        width = HEADS * DIM
        self.embedding, self.places = weight(VOCAB, width) * VOCAB**0.5, weight(positions, width) * positions**0.5
        self.inputs = [weight(width, (HEADS + 2 * KV_HEADS) * DIM) * 2 for _ in range(2)]
        self.head = weight(width, VOCAB) * 4
        self.layers = [AttentionLayer(i, HEADS, KV_HEADS, DIM, window=window) for i, window in enumerate((-1, WINDOW))]

    def serve(self, backend: Any) -> Any:
        def forward(ids: Tensor, positions: Tensor, keep: Tensor | None, batch: Any, steps: Any) -> Tensor:
            logits = self._run(ids, positions, lambda layer, q, k, v: backend.forward(q, k, v, layer))
            return logits if keep is None else logits[keep]

        return forward

    def dense(self, tokens: Sequence[int]) -> Tensor:
        """Logits [T, V] of one sequence, in one piece."""

        def attend(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            place = torch.arange(len(tokens))
            seen = place[None] <= place[:, None]
            if layer.window >= 0:
                seen &= place[None] >= place[:, None] - layer.window
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
            return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)

        return self._run(torch.tensor(tokens), torch.arange(len(tokens)), attend)

    def _run(self, ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        x = self.embedding[ids] + self.places[positions]
        for layer, weight in zip(self.layers, self.inputs, strict=True):
            qkv = (x @ weight).unflatten(-1, (-1, DIM))
            out = attend(layer, *qkv.split([HEADS, KV_HEADS, KV_HEADS], 1))
            x = torch.nn.functional.normalize(x + out.flatten(1), dim=-1) * (HEADS * DIM) ** 0.5
        return x @ self.head
