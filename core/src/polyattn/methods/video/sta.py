"""`sliding_tile_attn`: each tile of a video sees a window of tiles, another for each step, layer and head.

Sliding tile attention, arXiv 2502.04507. Along each axis of n tiles, with a window of w: the window of tile q has its
centre at clamp(q, w // 2, n - 1 - w // 2), the upper bound first, and holds tile k where |centre - k| <= w // 2. All
tiles see the text that is no padding, and text sees all.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import Inner, Like, Place
from ...errors import ConfigError, InvalidInputError
from ...semantics.block_maps import lists_of
from ...semantics.validation import has_shapes_only
from .grids import Triple, grid_of
from .sta_search import losses, note, point, tuned
from .strategy import read_strategy
from .tiles import Cut, cut, tiles_by_token

__all__ = ["SlidingTile", "sta_mask"]

NAME = "sliding_tile_attn"
BLOCKS = (128, 64)
"""Tokens of a block that kernels take; a tile that neither divides is one block."""
_KEPT = 8


class _Plan(NamedTuple):
    """The lists of a step, on the device before a layer asks.

    Attributes:
        indices: int32 [windows, nQ, max], of each window. heads: int64 [layers, H], the window of each head.
        counts: int32 [layers, H], how much of its lists counts. most: the most of these in each layer.
    """

    cut: Cut
    indices: Tensor
    heads: Tensor
    counts: Tensor
    most: tuple[int, ...]


class SlidingTile:
    """A `polyattn.contract.Method`.

    Args:
        mask_strategy_file_path: of the windows, see `polyattn.methods.video.strategy`.
        sta_mode: "STA_inference" reads the file. "STA_searching" attends densely and notes what each candidate would
            lose; the folder gets a file for each branch of a run. "STA_tuning" and "STA_tuning_cfg" choose windows by
            these, the second by those of negative prompts too, write a strategy into the folder, and read it.
        sta_search_path: the folder of the other modes.
        skip_time_steps: how many of the first steps run dense. sta_tile: (t, h, w), tokens of a tile.
        sta_candidates: windows that a search tries, three numbers for each.

    Raises:
        ConfigError: a file that cannot be read or is none, a folder without losses, or candidates that are no triples.
    """

    def __init__(
        self,
        *,
        mask_strategy_file_path: str,
        sta_mode: str,
        skip_time_steps: int,
        sta_tile: Sequence[int],
        sta_search_path: str,
        sta_candidates: Sequence[int],
    ) -> None:
        t, h, w = sta_tile
        self.tile: Triple = (t, h, w)
        self.skip, self.path, self.folder = skip_time_steps, mask_strategy_file_path, sta_search_path
        self.searches = sta_mode == "STA_searching"
        if sta_mode != "STA_inference" and not os.path.isdir(self.folder):
            raise ConfigError(
                f"{NAME}: sta_mode={sta_mode!r} works in the folder of a search, and sta_search_path={self.folder!r} "
                "is none; give a folder that exists"
            )
        if self.searches:
            self.candidates = _triples(sta_candidates)
            self.skip = 0  # dense anyway, and what is lost there may be asked for later
        else:
            if sta_mode != "STA_inference":
                both = sta_mode == "STA_tuning_cfg"
                self.path = tuned(self.folder, skip_time_steps, self.tile, both=both)
            self.strategy = read_strategy(self.path)
        # Steps of one grid share their order of tokens.
        self._cut = functools.lru_cache(maxsize=_KEPT)(self._cut_at)

    def leaves_dense(self, place: Place) -> str:
        if self.skip and self._step(place) < self.skip:
            return f"the first {self.skip} steps run dense (skip_time_steps)"
        return ""

    def plan(self, place: Place, like: Like) -> _Plan:
        if self.searches:
            if place.heads is not None:
                raise InvalidInputError(
                    f"{NAME}: a search of windows by a layer whose heads lie on several ranks; each would write what "
                    "it found of its own. Search on one rank, and use what was found on many"
                )
            return self._tried(place, like)
        step, strategy, all_heads = self._step(place), self.strategy, place.all_heads(like.heads)
        if place.layers not in (None, strategy.layers) or all_heads != strategy.heads:
            layers = "" if place.layers is None else f"{place.layers} layers and "
            raise self._another(
                f"is for {strategy.layers} layers and {strategy.heads} heads, and the model has {layers}"
                f"{all_heads} heads"
            )
        found = self._cut(place.grid, place.text, place.valid_text, like.device)
        own = place.own_heads(like.heads)
        by_layer = [strategy.windows[step, layer][own] for layer in range(strategy.layers)]
        windows = sorted({window for one in by_layer for window in one})
        for window in windows:
            self._check(window, found.counts, self.strategy.path)
        lists = [_listed(found, window) for window in windows]
        most = max(one.shape[-1] for one in lists)
        padded = [torch.nn.functional.pad(one, (0, most - one.shape[-1])) for one in lists]
        numbers = {window: number for number, window in enumerate(windows)}
        heads = [[numbers[one] for one in windows] for windows in by_layer]
        counts = [[lists[number].shape[-1] for number in own] for own in heads]
        return _Plan(
            found,
            indices=torch.stack(padded),
            heads=torch.tensor(heads).to(like.device),
            counts=torch.tensor(counts, dtype=torch.int32).to(like.device),
            most=tuple(map(max, counts)),
        )

    def _tried(self, place: Place, like: Like) -> _Plan:
        """The lists of a search: those of the whole grid first, then of each candidate, for all heads."""
        found = self._cut(place.grid, place.text, place.valid_text, like.device)
        for window in self.candidates:
            self._check(window, found.counts, "sta_candidates")
        lists = [_listed(found, window) for window in (found.counts, *self.candidates)]
        most = tuple(one.shape[-1] for one in lists)
        padded = [torch.nn.functional.pad(one, (0, max(most) - one.shape[-1])) for one in lists]
        counts = torch.tensor(most, dtype=torch.int32)[:, None].to(like.device)
        return _Plan(found, torch.stack(padded), torch.arange(len(lists))[:, None].to(like.device), counts, most)

    def density(self, plan: _Plan, place: Place) -> float:
        if self.searches:
            return 1.0
        own = place.own_heads(plan.heads.shape[1])
        windows = self.strategy.windows[self._step(place), self._layer(place)][own]
        return sum(map(math.prod, windows)) / (len(windows) * plan.cut.count)

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
        found = plan.cut
        at = point(place) if self.searches else None
        q, k, v = found.queries.gather(query)[0], found.keys.gather(key)[0], found.keys.gather(value)[0]

        def under(row: int) -> Tensor:
            """By the lists of a row of the plan: of a layer, or of a window of a search."""
            indices = plan.indices[..., : plan.most[row]].index_select(0, plan.heads[row])[None]
            counts = plan.counts[row][None, :, None].expand(indices.shape[:-1])
            return found.fine(q, k, v, (counts, indices), inner)

        out = under(0 if self.searches else self._layer(place))
        if at is not None:
            with torch.no_grad():
                tried = [under(1 + number) for number in range(len(self.candidates))]
                if not has_shapes_only(query):
                    # As tokens: rows that fill up a tile are none.
                    full, *others = (found.queries.scatter(one) for one in (out, *tried))
                    lost = {w: losses(one, full) for w, one in zip(self.candidates, others, strict=True)}
                    about = {"tile": self.tile, "full": found.counts}
                    note(at, place.branch, self.folder, about, lost)
        return found.joined(out, query, key, value, inner)

    def _cut_at(self, grid: Any, text: Any, valid_text: Any, device: torch.device) -> Cut:
        tokens = math.prod(self.tile)
        block = next((size for size in BLOCKS if tokens % size == 0), tokens)
        like = Like(1, 1, 1, 0, 1, torch.float32, device)
        return cut(Place(grid=grid, text=text, valid_text=valid_text), self.tile, block, like, NAME)

    def _step(self, place: Place) -> int:
        if place.step is None:
            raise InvalidInputError(
                f"{NAME} has other windows in each step, and the place has no step: run.at(step=...) or Place(step=...)"
            )
        if place.steps not in (None, self.strategy.steps) or place.step >= self.strategy.steps:
            steps = f"step {place.step}" if place.steps is None else f"{place.steps} steps"
            raise self._another(f"is for {self.strategy.steps} steps, and the run has {steps}")
        return place.step

    def _layer(self, place: Place) -> int:
        layer = place.layer_number
        if layer is None:
            raise InvalidInputError(
                f"{NAME} has other windows in each layer, and the place has no layer: place(layer=...)"
            )
        if layer >= self.strategy.layers:
            raise self._another(f"is for {self.strategy.layers} layers, and this is layer {layer}")
        return layer

    def _check(self, window: Triple, counts: Triple, whose: str) -> None:
        for size, there, axis in zip(window, counts, ("time", "height", "width"), strict=True):
            if size > there:
                raise self._another(
                    f"has the window {list(window)}, and the grid has {list(counts)} tiles of {list(self.tile)} tokens",
                    whose,
                )
            if size % 2 == 0 and size != there:
                raise InvalidInputError(
                    f"{NAME}: {whose} has the window {list(window)}, even along {axis}, which would cover "
                    f"{size + 1} tiles of {there}; a window is odd, or as long as the grid"
                )

    def _another(self, why: str, whose: str = "") -> InvalidInputError:
        asked = "windows of this grid" if self.searches else "the mask strategy of this model, steps and grid"
        return InvalidInputError(f"{NAME}: {whose or self.path} {why}; give {asked}")


def _triples(numbers: Sequence[int]) -> tuple[Triple, ...]:
    """
    Raises:
        ConfigError: they are no windows.
    """
    if not numbers or len(numbers) % 3:
        raise ConfigError(
            f"{NAME}: sta_candidates has {len(numbers)} numbers; give three for each window: [t, h, w, ...]"
        )
    return tuple((numbers[n], numbers[n + 1], numbers[n + 2]) for n in range(0, len(numbers), 3))


def _axis(size: int, tiles: int) -> Tensor:
    """bool [tiles, tiles]: the tiles in the window of each, along one axis."""
    number, half = torch.arange(tiles), size // 2
    centre = number.clamp(min=half).clamp(max=tiles - 1 - half)
    return (centre[:, None] - number).abs() <= half


def _listed(found: Cut, window: Triple) -> Tensor:
    """The blocks that each block of the video sees, text first: int32 [nQ, listed]. All lists are of one length."""
    t, h, w = (_axis(size, tiles) for size, tiles in zip(window, found.counts, strict=True))
    seen = torch.einsum("ad,be,cf->abcdef", t.int(), h.int(), w.int()).reshape(found.count, found.count).bool()
    _, tiles = lists_of(seen)
    tiles = tiles[:, : math.prod(window), None] * found.per + torch.arange(found.per, dtype=torch.int32)
    video = found.count * found.per
    text = torch.arange(video, video + found.text, dtype=torch.int32).expand(found.count, -1)
    listed = torch.cat([text, tiles.flatten(1)], 1).repeat_interleave(found.per, 0)
    return listed.to(torch.int32).to(found.keys.sizes.device)


def sta_mask(place: Place, tile: Triple, windows: Sequence[Triple]) -> Tensor:
    """The mask that the method is defined by, token by token, whatever the order of blocks.

    Args:
        place: with a grid. tile: (t, h, w), tokens of a tile. windows: in tiles, one for each head.

    Returns:
        bool [1, heads, S, S], True = the query sees the key.
    """
    numbers, counts = tiles_by_token(place, tile, NAME)
    text = numbers[:, 0] < 0
    tiles = [-(-size // step) for size, step in zip(grid_of(place, NAME), tile, strict=True)]
    masks = []
    for window in windows:
        near = torch.ones(len(numbers), len(numbers), dtype=torch.bool)
        for axis, (size, count) in enumerate(zip(window, tiles, strict=True)):
            mine, half = numbers[:, axis], size // 2
            centre = torch.minimum(mine.clamp(min=half), torch.tensor(count - 1 - half))
            near &= (centre[:, None] - mine).abs() <= half
        masks.append((near | text[:, None] | text) & counts)
    return torch.stack(masks)[None]
