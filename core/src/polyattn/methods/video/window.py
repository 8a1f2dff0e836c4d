"""`window_video_attn`: each tile of a video sees the tiles around it, and the text. An example of how a method is made.

The map depends on nothing but the grid, so there is nothing to train and nothing to keep. A reach as long as the grid
leaves the call dense by a rule, which `explain` says: nothing is left out there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import Inner, Like, Place
from ...errors import InvalidInputError
from ...semantics.block_maps import lists_of
from ..text import valid_of
from .grids import Tiles, Triple, grid_of, tiles_of
from .steps import first_ones

__all__ = ["WindowVideo", "window_mask"]

NAME = "window_video_attn"


class _Plan(NamedTuple):
    tiles: Tiles
    lists: tuple[Tensor, Tensor]


class WindowVideo:
    """A `polyattn.contract.Method`.

    Args:
        window_reach: tiles that a tile sees on either side along time, height and width: three numbers, or three for
            each head. window_tile: (t, h, w), tokens of a tile.
        first_full_step, first_full_layer: how many of the first steps and layers run dense.
    """

    plans_by_step = False

    def __init__(
        self, *, window_reach: Sequence[int], window_tile: Sequence[int], first_full_step: int, first_full_layer: int
    ) -> None:
        self.reach, self.tile = tuple(window_reach), _triple(window_tile)
        self.steps, self.layers = first_full_step, first_full_layer

    def leaves_dense(self, place: Place) -> str:
        return first_ones(place, NAME, steps=self.steps, layers=self.layers) or self._sees_all(place)

    def _sees_all(self, place: Place) -> str:
        if len(self.reach) != 3:  # reaches of single heads are counted where the heads are known
            return ""
        counts = [-(-size // step) for size, step in zip(grid_of(place, NAME), self.tile, strict=True)]
        if any(reach < count - 1 for reach, count in zip(self.reach, counts, strict=True)):
            return ""
        return (
            f"window_reach={list(self.reach)} is the whole grid, {counts} tiles of {list(self.tile)}; a window has a "
            f"reach below {[count - 1 for count in counts]} along one of its axes"
        )

    def plan(self, place: Place, like: Like) -> _Plan:
        tiles = tiles_of(place, self.tile, like, NAME)
        found = reaches(self.reach, place.all_heads(like.heads))
        found = found[place.own_heads(like.heads)] if len(found) > 1 else found
        return _Plan(tiles, lists_of(block_map(tiles, found)))

    def density(self, plan: _Plan, place: Place) -> float:
        reach, counts = self.reach, plan.tiles.counts
        if len(reach) > 3:
            own = place.own_heads(plan.lists[0].shape[1])
            reach = reach[3 * own.start : 3 * own.stop]
        # Along an axis of n tiles, those at distance d of each other are 2 (n - d) pairs, n where d is 0.
        near = [
            sum((1 + (d > 0)) * (n - d) for d in range(min(r, n - 1) + 1)) / n**2
            for r, n in zip(reach, counts * (len(reach) // 3), strict=True)
        ]
        return sum(math.prod(near[i : i + 3]) for i in range(0, len(near), 3)) * 3 / len(near)

    def attend(
        self,
        plan: _Plan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        place: Place,
        kept: dict[str, Any],
        inner: Inner,
    ) -> Tensor:
        tiles = plan.tiles
        out: Tensor = inner.block_sparse(
            *(tiles.into(tensor) for tensor in (query, key, value)),
            lists=plan.lists,
            block_shape=(tiles.block, tiles.block),
            block_valid=tiles.valid,
        )
        return tiles.out_of(out)


def reaches(reach: tuple[int, ...], heads: int) -> list[Triple]:
    """One reach for all heads, or one for each.

    Raises:
        InvalidInputError: another number of them.
    """
    if len(reach) not in (3, 3 * heads):
        raise InvalidInputError(
            f"{NAME}: window_reach has {len(reach)} numbers; a call of {heads} heads takes 3 (time, height, width), or "
            f"{3 * heads}, three for each head"
        )
    return [_triple(reach[i : i + 3]) for i in range(0, len(reach), 3)]


def block_map(tiles: Tiles, reach: Sequence[Triple]) -> Tensor:
    """bool [1, heads|1, blocks, blocks]: tiles within reach of each other, and text with everything."""
    numbers = tiles.numbers()
    apart = (numbers[:, None] - numbers[None]).abs()
    near = [(apart <= torch.tensor(one, device=apart.device)).all(-1) for one in reach]
    # Both ways: text sees all tiles, and all tiles see text.
    return torch.nn.functional.pad(torch.stack(near)[None], (0, tiles.text, 0, tiles.text), value=True)


def window_mask(place: Place, tile: Sequence[int], reach: Sequence[int], heads: int = 1) -> Tensor:
    """The mask that the method is defined by, token by token, whatever the order of blocks.

    Args:
        place: with a grid. tile, reach: as `WindowVideo`. heads: H_q.

    Returns:
        bool [1, heads|1, S, S], True = the query sees the key. `polyattn.attention` under it in float64 is the
        reference.
    """
    T, H, W = grid_of(place, NAME)
    (front, back), (valid_front, valid_back) = place.text, valid_of(place)
    cells = torch.cartesian_prod(torch.arange(T), torch.arange(H), torch.arange(W)) // torch.tensor(_triple(tile))
    apart = (cells[:, None] - cells[None]).abs()
    near = torch.stack([(apart <= torch.tensor(one)).all(-1) for one in reaches(tuple(reach), heads)])
    mask = torch.nn.functional.pad(near, (front, back, front, back), value=True)
    mask[..., valid_front:front] = False
    mask[..., front + T * H * W + valid_back :] = False
    return mask[None]


def _triple(numbers: Sequence[int]) -> Triple:
    t, h, w = numbers
    return t, h, w
