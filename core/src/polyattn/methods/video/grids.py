"""Tokens of a video grid ordered tile by tile, with the text in blocks behind them: what kernels of block maps need.

A tile is (t, h, w) tokens and becomes one block. Tiles at the far edges of a grid that they do not divide hold fewer
tokens; their blocks are filled up, and say how many of their tokens count.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ...contract import Like, Place
from ...errors import InvalidInputError
from ..text import valid_of

__all__ = ["AGAIN", "Tiles", "grid_of", "tile_cells", "tiles_of"]

Triple = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """An order of the tokens of a call in blocks.

    Attributes:
        block: tokens of a block. counts: tiles along time, height and width. text: blocks of text behind them.
        order: int64 [blocks * block], which token lies at each place. Places that fill up a block repeat a token.
        back: int64 [S], the place of each token.
        valid: int32 [blocks], tokens of each block that count as keys, its first ones.
    """

    block: int
    counts: Triple
    text: int
    order: Tensor
    back: Tensor
    valid: Tensor

    def into(self, tensor: Tensor) -> Tensor:
        """[B, H, S, D] -> [B, H, blocks * block, D]."""
        return tensor.index_select(2, self.order)

    def out_of(self, tensor: Tensor) -> Tensor:
        """[B, H, blocks * block, D] -> [B, H, S, D]."""
        return tensor.index_select(2, self.back)

    def numbers(self) -> Tensor:
        """The tile of each block, int64 [tiles, 3]: its number along time, height and width."""
        axes = [torch.arange(count, device=self.order.device) for count in self.counts]
        return torch.cartesian_prod(*axes)


AGAIN = (
    ". A layer that a backward computes again (activation checkpointing) keeps its place by "
    "context_fn=polyattn.checkpoint_context_fn"
)
"""What to do where a place has lost what its run said."""


def grid_of(place: Place, method: str) -> Triple:
    """The grid of a place.

    Raises:
        InvalidInputError: it has none.
    """
    if place.grid is None:
        raise InvalidInputError(
            f"{method} works on a grid, and the place has none: give Place(grid=(T, H, W), ...), the tokens of the "
            f"video along time, height and width{AGAIN}"
        )
    return place.grid


def tile_cells(place: Place, tile: Triple, method: str) -> tuple[Triple, Tensor]:
    """The video's tokens, tile after tile, each with w fastest.

    Returns:
        (tiles along time, height and width; int64 [tiles, t * h * w], the tokens of each, then -1).
    """
    T, H, W = grid = grid_of(place, method)
    (nt, nh, nw), (t, h, w) = (-(-size // step) for size, step in zip(grid, tile, strict=True)), tile
    numbers = torch.full([nt * t, nh * h, nw * w], -1)
    numbers[:T, :H, :W] = torch.arange(T * H * W).view(grid) + place.text[0]
    tiles = numbers.view(nt, t, nh, h, nw, w).permute(0, 2, 4, 1, 3, 5).reshape(-1, t * h * w)
    return (nt, nh, nw), tiles.gather(-1, (tiles < 0).to(torch.uint8).argsort(dim=-1, stable=True))


def tiles_of(place: Place, tile: Triple, like: Like, method: str) -> Tiles:
    """The order of a place's tokens, tile after tile, then the text."""
    (front, back), cells = place.text, math.prod(grid_of(place, method))
    counts, tiles = tile_cells(place, tile, method)
    block = tiles.shape[1]

    first = torch.arange(front)
    last = torch.arange(back) + front + cells
    valid_front, valid_back = valid_of(place)
    seen = torch.cat([first[:valid_front], last[:valid_back]])
    hidden = torch.cat([first[valid_front:], last[valid_back:]])
    blocks = -(-(front + back) // block)
    text = torch.full([blocks * block], -1)
    text[: front + back] = torch.cat([seen, hidden])

    order = torch.cat([tiles, text.view(blocks, block)])
    counted = torch.cat([(order[: len(tiles)] >= 0).sum(-1), _shares(len(seen), blocks, block)])
    places = torch.empty(cells + front + back, dtype=torch.int64)
    flat = order.flatten()
    places[flat[flat >= 0]] = torch.arange(flat.numel())[flat >= 0]
    return Tiles(
        block,
        counts,
        blocks,
        order=flat.clamp(min=0).to(like.device),
        back=places.to(like.device),
        valid=counted.to(torch.int32).to(like.device),
    )


def _shares(tokens: int, blocks: int, block: int) -> Tensor:
    return (tokens - torch.arange(blocks) * block).clamp(0, block)
