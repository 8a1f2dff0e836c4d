"""`Place`: where in a model a call of attention is. Methods need it; exact attention never looks at it. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ..errors import InvalidInputError
from . import scalars

__all__ = ["Place"]

_WORDS = {"grid": "(T, H, W)", "text": "(front, back)", "valid_text": "(front, back)", "heads": "(first, of how many)"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """A place says where in a model one call of attention is: `polyattn.attention(..., place=Place(...))`.

    The tokens of the call are front text, then the grid with w fastest (cell (t * H + h) * W + w), then back text.

    Attributes:
        grid: (T, H, W), tokens of the video or image along time, height and width; None = the call has no grid.
        text: (front, back), text tokens before and after those of the grid.
        valid_text: (front, back), how many of these are no padding, the first ones of each; None = all.
        layer: number of the layer, from 0: an int, or an integer tensor without axes (a layer compiled once for all
            layers holds its number so). A method that reads the number of a tensor on a device waits for the device.
        layers: how many there are. step: number of the denoising step, from 0. steps: how many there are.
        timestep: what the model is told of the step, as the host has it.
        branch: of classifier-free guidance, such as "cond" and "uncond"; "" where there is one.
        role: "self" or "cross": whose keys these are. None = not said, which is taken for "self".
        tensors: what the model learned for a method, by name.
        kept: what a method keeps for this layer and branch from step to step, a dict that belongs to the run; None =
            nothing outlives the call.
        heads: (first, of how many), which of the model's query heads the call has where other ranks have the others;
            None = all of them.
        run: the `polyattn.video.Run` that is told who served the call; None = nobody.
    """

    grid: tuple[int, int, int] | None = None
    text: tuple[int, int] = (0, 0)
    valid_text: tuple[int, int] | None = None
    layer: Any = None
    layers: int | None = None
    step: int | None = None
    steps: int | None = None
    timestep: Any = None
    branch: str = ""
    role: Literal["self", "cross"] | None = None
    tensors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kept: dict[str, Any] | None = None
    run: Any = None
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            InvalidInputError: a value that no call can have.
        """
        for name, low, count in (("grid", 1, 3), ("text", 0, 2), ("valid_text", 0, 2), ("heads", 0, 2)):
            value = getattr(self, name)
            if value is None and name != "text":
                continue
            sizes = isinstance(value, (tuple, list)) and len(value) == count
            if not sizes or any(not scalars.whole(n) or n < low for n in value):
                raise self._wrong(name, f"{_WORDS[name]}, whole numbers of {low} or more")
            object.__setattr__(self, name, tuple(map(int, value)))
        if any(valid > there for valid, there in zip(self.valid_text or (), self.text, strict=False)):
            raise self._wrong("valid_text", f"at most text={self.text}")
        for name, total in (("layer", self.layers), ("step", self.steps)):
            value = getattr(self, name)
            if total is not None and (not scalars.whole(total) or total < 1):
                raise self._wrong(f"{name}s", "a whole number of 1 or more, or None")
            if value is not None and not (name == "layer" and getattr(value, "ndim", -1) == 0):
                self._check_number(name, value, total)
        for name, kinds in (("tensors", Mapping), ("kept", (dict, type(None)))):
            if not isinstance(getattr(self, name), kinds):
                raise self._wrong(name, "a dict of tensors by name" if name == "tensors" else "a dict, or None")
        if not isinstance(self.branch, str):
            raise self._wrong("branch", "a word such as 'cond', or '' where there is one branch")
        if self.role not in (None, "self", "cross"):
            raise self._wrong("role", "'self', 'cross' or None")

    def _check_number(self, name: str, value: Any, total: int | None) -> None:
        if not scalars.whole(value) or not 0 <= value < (total or value + 1):
            raise self._wrong(name, f"a whole number from 0, below {name}s={total}")

    def _wrong(self, name: str, allowed: str) -> InvalidInputError:
        return InvalidInputError(f"place: {name}={scalars.shown(getattr(self, name))} must be {allowed}")

    def own_heads(self, heads: int) -> slice:
        """Those of a call of `heads` query heads, among all of the model's.

        Raises:
            InvalidInputError: the model has fewer.
        """
        first, total = self.heads or (0, heads)
        if first + heads > total:
            raise self._wrong("heads", f"(first, of how many) of a call of {heads} heads, which end at {first + heads}")
        return slice(first, first + heads)

    def all_heads(self, heads: int) -> int:
        """Query heads of the model, where a call has `heads` of them."""
        return heads if self.heads is None else self.heads[1]

    @property
    def tokens(self) -> int | None:
        """S of a call at this place: the grid and the text; None where there is no grid."""
        if self.grid is None:
            return None
        t, h, w = self.grid
        return t * h * w + sum(self.text)

    @property
    def layer_number(self) -> int | None:
        """`layer` as an int. Of a tensor on a device this waits for the device.

        Raises:
            InvalidInputError: the number in a tensor is none of a layer.
        """
        if getattr(self.layer, "ndim", -1) != 0:
            return self.layer  # type: ignore[no-any-return]
        number = self.layer.item()
        self._check_number("layer", number, self.layers)
        return int(number)
