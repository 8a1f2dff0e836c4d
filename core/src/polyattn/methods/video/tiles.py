"""Calls of a method on tiles: queries of the video by lists of blocks, those of the text densely.

A tile is cut into blocks of the size that kernels take. Text is small and sees all keys: its rows need no list.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ...contract import Inner, Like, Place
from ..text import no_padding, valid_of
from .grids import Triple, grid_of, tile_cells
from .rows import Blocks

__all__ = ["Cut", "cut", "scale_of", "tiles_by_token"]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The tokens of a call, cut into blocks.

    Attributes:
        counts: tiles along time, height and width. count: all of them. per: blocks of a tile. text: blocks of text.
        queries: blocks of the video. keys: these, and behind them blocks of the text that is no padding; packed where
            the grid is not whole tiles, so that no kernel loads what fills them up.
        rows: int64 [text tokens], where the call has its text. place: of the call.
    """

    counts: Triple
    count: int
    per: int
    text: int
    queries: Blocks
    keys: Blocks
    rows: Tensor
    place: Place

    def fine(self, query: Tensor, key: Tensor, value: Tensor, lists: tuple[Tensor, Tensor], inner: Inner) -> Tensor:
        """The video's queries by lists of blocks.

        Args:
            query: as `queries` has them. key, value: as `keys` has them. lists: (counts, indices), see
                `block_sparse_attention`.

        Returns:
            [B, H_q, rows of queries, D_v].
        """
        keys, more = self.keys, {}
        if keys.filled:
            more = {"block_valid": keys.sizes}
        else:
            more = {"block_valid": keys.sizes[None, None], "block_starts": keys.starts[None, None]}
        out: Tensor = inner.block_sparse(query, key, value, lists=lists, block_shape=(keys.block, keys.block), **more)
        return out

    def joined(
        self,
        video: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        inner: Inner,
        *,
        gate: Tensor | None = None,
        coarse: Tensor | None = None,
    ) -> Tensor:
        """The call's rows in their own order: those of the video, and those of the text, which this computes densely.

        Args:
            video: of `fine`. query, key, value: of the call, [B, H, S, D].
            coarse: [B, H_q, blocks of queries, D_v], which all rows of a block get. gate: [B|1, H_q|1, S|1, D_v|1], its
                weight.

        Returns:
            [B, H_q, S, D_v].
        """
        out = self.queries.scatter(video, gate=gate, coarse=coarse)
        if self.rows.numel():
            out = out.index_copy_(2, self.rows, self._text(query, key, value, inner))
        return out

    def _text(self, query: Tensor, key: Tensor, value: Tensor, inner: Inner) -> Tensor:
        out: Tensor = inner.dense(query.index_select(2, self.rows), *no_padding(self.place, key, value))
        return out


def cut(place: Place, tile: Triple, block: int, like: Like, method: str) -> Cut:
    """The tokens at a place, in tiles that are cut into blocks.

    Args:
        tile: (t, h, w), tokens of a tile. block: tokens of a block; a tile is a whole number of blocks.

    Raises:
        InvalidInputError: the place has no grid.
    """
    counts, cells = tile_cells(place, tile, method)
    (count, tokens), device = cells.shape, like.device
    grid, (front, back) = grid_of(place, method), place.text
    video, total = math.prod(grid), math.prod(grid) + front + back
    valid_front, valid_back = valid_of(place)
    text = torch.cat([torch.arange(valid_front), torch.arange(front + video, front + video + valid_back)])
    per, blocks = tokens // block, -(-len(text) // block)
    order = torch.cat([cells[cells >= 0], text])
    held = (cells >= 0).sum(-1)
    sizes = [(n - torch.arange(k) * block).clamp(0, block) for n, k in ((held[:, None], per), (len(text), blocks))]
    sizes = [part.flatten() for part in sizes]
    whole = all(size % step == 0 for size, step in zip(grid, tile, strict=True))
    sides = []
    for tokens_of, sizes_of, filled in ((order[:video], sizes[0], True), (order, torch.cat(sizes), whole)):
        starts = sizes_of.cumsum(0) - sizes_of
        lists = [t.to(torch.int32).to(device) for t in (tokens_of, starts, sizes_of)]
        sides.append(Blocks(block, lists[0], lists[1], lists[2], total, filled).ready())
    rows = torch.cat([torch.arange(front), torch.arange(front + video, total)])
    return Cut(
        counts,
        count,
        per,
        blocks,
        sides[0],
        sides[1],
        rows.to(device),
        Place(text=place.text, valid_text=place.valid_text),
    )


def tiles_by_token(place: Place, tile: Triple, method: str) -> tuple[Tensor, Tensor]:
    """What the definitions of methods are written with: the tile of each token, whatever the order of blocks.

    Returns:
        (int64 [S, 3], the tile's number along time, height and width, -1 of text; bool [S], whether a key counts).
    """
    T, H, W = grid_of(place, method)
    (front, back), (valid_front, valid_back) = place.text, valid_of(place)
    cells = torch.cartesian_prod(torch.arange(T), torch.arange(H), torch.arange(W)) // torch.tensor(tile)
    numbers = torch.nn.functional.pad(cells, (0, 0, front, back), value=-1)
    counts = torch.ones(len(numbers), dtype=torch.bool)
    counts[valid_front:front] = False
    counts[front + T * H * W + valid_back :] = False
    return numbers, counts


def scale_of(inner: Inner, query: Tensor) -> float:
    """The scale of the call's logits."""
    return float(query.shape[-1] ** -0.5 if inner.scale is None else inner.scale)
