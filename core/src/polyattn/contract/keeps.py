"""`Keep`: one thing that a layer of a model keeps between calls, and its format."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from ..errors import InvalidInputError, did_you_mean
from . import scalars
from .request import DTYPES

__all__ = ["Keep"]

Per = Literal["token", "request", "run"]

_ALLOWED = {
    "per": get_args(Per),
    "dtype": ("", *DTYPES, "uint8", "int32", "int64", "bool"),
    "scales": ("", "tensor", "head", "token", "block16", "block128"),
    "layout": ("", "NHD", "HND"),
}


@dataclasses.dataclass(frozen=True)
class Keep:
    """One thing that a layer keeps between calls. Its life cycle is allocate, reset, fork, commit and drop.

    Attributes:
        name: unique within the layer: key, value, latent, state, conv, index, centroids, ...
        per: whose it is. "token": a row for each token of a request, in pages. "request": a state for each request, in
            the slot of its row of the request table. "run": a state for each run and branch, such as one denoising.
        shape: of one of them. per="token": (H, D), or (D,) for one row for all heads.
        dtype: a word of requests, or uint8, int32, int64 or bool; "" = that of the pool (per="token"), of the model
            (others).
        scales, layout: only of per="token": granularity of the scales, and NHD or HND; "" = those of the pool.

    Raises:
        InvalidInputError: a value that no keep has.
    """

    name: str
    per: Per
    shape: tuple[int, ...]
    dtype: str = ""
    scales: str = ""
    layout: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            self._refuse("name", "a word such as 'state' is needed")
        for field, words in _ALLOWED.items():
            if (value := getattr(self, field)) not in words:
                self._refuse(field, f"allowed: {', '.join(map(repr, words))}.{did_you_mean(str(value), words)}")
        if not isinstance(self.shape, (tuple, list)) or not all(scalars.whole(n) and n > 0 for n in self.shape):
            self._refuse("shape", "whole numbers above 0 are needed, such as (heads, head_dim)")
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        if self.per == "token" and len(self.shape) not in (1, 2):
            self._refuse("shape", "the row of a token is (H, D), or (D,) for one that serves all heads")
        for field in ("scales", "layout"):
            if getattr(self, field) and (self.per != "token" or (field == "layout" and len(self.shape) == 1)):
                self._refuse(field, 'only rows of tokens by head (per="token", shape (H, D)) have one: leave it empty')

    def _refuse(self, field: str, allowed: str) -> Any:
        raise InvalidInputError(f"Keep {self.name!r}: {field}={getattr(self, field)!r}; {allowed}")
