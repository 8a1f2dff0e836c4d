"""This module turns the queries of a model of dual chunk attention to the positions that each of its calls needs.

transformers knows nothing of the chunks. The model is run at positions within a chunk, at which its keys and the
queries of their own chunk are right; queries for earlier chunks are turned further by the model's own frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedRequestError
from ...serving.dual_chunk import DualChunk

__all__ = ["Turning", "chunks_of"]


def chunks_of(config: Any) -> DualChunk | None:
    """Read the chunks of a model's config, None = it has none.

    Raises:
        InvalidInputError: as `DualChunk.from_config`.
    """
    given = getattr(config, "dual_chunk_attention_config", None)
    return DualChunk.from_config(given) if given else None


class Turning:
    """The queries of a model in each step.

    Args:
        chunks: of its layers. model: which turns all of them by one module with `inv_freq`.

    Raises:
        UnsupportedRequestError: it has no such module, or several.
    """

    def __init__(self, chunks: DualChunk, model: nn.Module) -> None:
        rotary = [module for module in model.modules() if hasattr(module, "inv_freq")]
        if len(rotary) != 1:
            raise _refused(model, f"{len(rotary)} modules make its rotary positions, and one is needed")
        self.chunks, self._model = chunks, model
        self._rotary: Any = rotary[0]
        self._cos = self._sin = torch.empty(0)
        self._factor: Tensor | None = None

    def plan(self, positions: Tensor) -> Tensor:
        """Take the positions of a step's tokens, int64 [T]; return those that the model is run at."""
        self._cos, self._sin = self._turns(torch.stack(self.chunks.turns(positions), 1))
        factor = self.chunks.factor(positions)
        self._factor = None if factor is None else factor[:, None, None, None]
        return self.chunks.positions(positions)

    def queries(self, query: Tensor) -> Tensor:
        """[T, 3, H_q, D] of a layer's [T, H_q, D]; rounded once."""
        wide = query.to(torch.promote_types(query.dtype, torch.float32))
        found = torch.cat([wide[:, None], _turned(wide[:, None], self._cos, self._sin)], 1)
        return (found if self._factor is None else found * self._factor.to(found.dtype)).to(query.dtype)

    def check(self, run: Callable[[Sequence[int]], list[tuple[Any, Tensor, Tensor, Tensor]]]) -> None:
        """Compare turned queries with those of the model at the positions that they are turned to.

        Raises:
            UnsupportedRequestError: the model turns them otherwise.
        """
        cos, sin = self._turns(torch.tensor([[2], [3], [5]], device=self._rotary.inv_freq.device))
        for (module, near, *_), (_, far, *_) in zip(run((0, 1, 2)), run((2, 4, 7)), strict=True):
            rows = (near[0].transpose(0, 1)[:, None].double(), far[0].transpose(0, 1)[:, None].double())
            distance = (_turned(rows[0], cos, sin) - rows[1]).norm()
            if not distance <= (1e-4 if near.dtype.itemsize >= 4 else 2e-2) * rows[1].norm():
                kind = type(module).__name__
                raise _refused(self._model, f"{kind} turns its queries otherwise than by halves of a row")

    def _turns(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, n, 1, d] of int64 [T, n] positions further, without the model's factor."""
        kind = torch.float64 if self._rotary.inv_freq.dtype == torch.float64 else torch.float32
        cos, sin = self._rotary(torch.empty(0, dtype=kind, device=angles.device), angles.reshape(1, -1))
        factor = getattr(self._rotary, "attention_scaling", 1.0)
        shape = (*angles.shape, 1, cos.shape[-1])
        return (cos[0] / factor).view(shape), (sin[0] / factor).view(shape)


def _turned(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first d numbers of [T, 1, H, D] by [T, n, 1, d]: [T, n, H, D]."""
    d = cos.shape[-1]
    first, rest = rows[..., :d], rows[..., d:]
    a, b = first.chunk(2, -1)
    turned = first * cos + torch.cat([-b, a], -1) * sin
    return torch.cat([turned, rest.expand(-1, turned.shape[1], -1, -1)], -1) if rest.shape[-1] else turned


def _refused(model: Any, why: str) -> UnsupportedRequestError:
    what = f"{type(model).__name__} has dual_chunk_attention_config"
    return UnsupportedRequestError(
        f"{what}: {why}; where plain attention is what you want, set config.dual_chunk_attention_config = None first",
        {"serving": [f"{what}: {why}"]},
    )
