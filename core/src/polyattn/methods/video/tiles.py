"""Calls of a method on tiles: queries of the video by lists of blocks, those of the text densely.

A tile is cut into blocks of the size that kernels take. Text is small and sees all keys: its rows need no list.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ...contract import Inner, Like, Place
from .grids import Tiles, Triple, grid_of, tiles_of

__all__ = ["Cut", "by_tile", "cut", "scale_of", "tiles_by_token"]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The tokens of a call, cut into blocks.

    Attributes:
        tiles: their order; the text is in tiles of its own behind the video's.
        block: tokens of a block. per: blocks of a tile. count: tiles of the video. text: blocks of text.
        valid: int32 [blocks], tokens of each block that count as keys, its first ones.
        sizes: int64 [count], tokens of each tile of the video. whole: all tiles are full.
        rows: int64 [text tokens], where the call has its text. seen: int64 [keys], the keys that text sees: the video's
            and the valid ones of text. back: int64 [S], where `joined` finds each token.
    """

    tiles: Tiles
    block: int
    per: int
    count: int
    text: int
    valid: Tensor
    sizes: Tensor
    whole: bool
    rows: Tensor
    seen: Tensor
    back: Tensor

    def queries(self, tensor: Tensor) -> Tensor:
        """[B, H, S, D] -> those of the video, tile after tile, [B, H, count * tile, D]."""
        return tensor.index_select(2, self.tiles.order[: self.count * self.tiles.block])

    def keys(self, tensor: Tensor) -> Tensor:
        """[B, H, S, D] -> all, tile after tile, then text, [B, H, blocks * block, D]."""
        return self.tiles.into(tensor)

    def means(self, tensor: Tensor) -> Tensor:
        """The mean of each tile of the video over the tokens that it has.

        Args:
            tensor: of `queries` or `keys`.

        Returns:
            [B, H, count, D], float64 of float64, else float32.
        """
        tokens = self.tiles.block
        split = by_tile(tensor[:, :, : self.count * tokens], tokens)
        if not self.whole:
            filler = torch.arange(tokens, device=split.device) >= self.sizes[:, None]
            split = split.masked_fill(filler[..., None], 0)
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        total: Tensor = split.sum(3, dtype=wide)
        return total / self.sizes[:, None]

    def fine(self, query: Tensor, key: Tensor, value: Tensor, lists: tuple[Tensor, Tensor], inner: Inner) -> Tensor:
        """The video's queries by lists of blocks.

        Args:
            query: of `queries`. key, value: of `keys`. lists: (counts, indices), see `block_sparse_attention`.

        Returns:
            [B, H_q, count * tile, D_v].
        """
        shape = (self.block, self.block)
        out: Tensor = inner.block_sparse(query, key, value, lists=lists, block_shape=shape, block_valid=self.valid)
        return out

    def joined(self, video: Tensor, query: Tensor, key: Tensor, value: Tensor, inner: Inner) -> Tensor:
        """The call's rows in their own order: those of the video, and those of the text, which this computes densely.

        Args:
            video: [B, H_q, count * tile, D_v]. query, key, value: of the call, [B, H, S, D].

        Returns:
            [B, H_q, S, D_v].
        """
        if self.rows.numel():
            text = inner.dense(*(t.index_select(2, at) for t, at in self._text(query, key, value)))
            video = torch.cat([video, text], 2)
        return video.index_select(2, self.back)

    def _text(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        return (query, self.rows), (key, self.seen), (value, self.seen)


def cut(place: Place, tile: Triple, block: int, like: Like, method: str) -> Cut:
    """The tokens at a place, in tiles that are cut into blocks.

    Args:
        tile: (t, h, w), tokens of a tile. block: tokens of a block; a tile is a whole number of blocks.

    Raises:
        InvalidInputError: the place has no grid.
    """
    tiles = tiles_of(place, tile, like, method)
    count, per, device = math.prod(tiles.counts), tiles.block // block, like.device
    cells, (front, back) = math.prod(grid_of(place, method)), place.text
    valid_front, valid_back = place.text if place.valid_text is None else place.valid_text
    valid = (tiles.valid[:, None] - torch.arange(per, device=device) * block).clamp(0, block)
    rows = torch.cat([torch.arange(front), front + cells + torch.arange(back)])
    seen = torch.cat([torch.arange(valid_front), front + torch.arange(cells + valid_back)])
    where = tiles.back.clone()
    where[rows] = count * tiles.block + torch.arange(len(rows), device=device)
    return Cut(
        *(tiles, block, per, count, tiles.text * per),
        valid=valid.flatten().to(torch.int32),
        sizes=tiles.valid[:count].long(),
        whole=all(size % step == 0 for size, step in zip(grid_of(place, method), tile, strict=True)),
        rows=rows.to(device),
        seen=seen.to(device),
        back=where,
    )


def by_tile(tensor: Tensor, tokens: int) -> Tensor:
    """[B, H, tiles * tokens, D] -> [B, H, tiles, tokens, D]."""
    B, H, S, D = tensor.shape
    return tensor.reshape(B, H, S // tokens, tokens, D)


def tiles_by_token(place: Place, tile: Triple, method: str) -> tuple[Tensor, Tensor]:
    """What the definitions of methods are written with: the tile of each token, whatever the order of blocks.

    Returns:
        (int64 [S, 3], the tile's number along time, height and width, -1 of text; bool [S], whether a key counts).
    """
    T, H, W = grid_of(place, method)
    (front, back), (valid_front, valid_back) = place.text, place.text if place.valid_text is None else place.valid_text
    cells = torch.cartesian_prod(torch.arange(T), torch.arange(H), torch.arange(W)) // torch.tensor(tile)
    numbers = torch.nn.functional.pad(cells, (0, 0, front, back), value=-1)
    counts = torch.ones(len(numbers), dtype=torch.bool)
    counts[valid_front:front] = False
    counts[front + T * H * W + valid_back :] = False
    return numbers, counts


def scale_of(inner: Inner, query: Tensor) -> float:
    """The scale of the call's logits."""
    return float(query.shape[-1] ** -0.5 if inner.scale is None else inner.scale)
