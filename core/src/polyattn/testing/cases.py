"""This module defines one case of conformance: a request, the lengths of its sequences, and how its tensors lie in
memory."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any, Literal

from ..contract import AttentionRequest

__all__ = ["FAR", "Case", "Check", "Placed"]

FAR = 107.0
"""Nats from 0 at which `low` and `high` logits lie: exp(-lse) of such a row, LSE -99 or so, is no float32 any more."""

_MANY = 64
"""Sequences of one length that an id counts instead of naming each."""

Check = Literal["values", "decode", "split", "pages", "dropout", "capture", "refusal", "witness", "fault"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """Describes where in a model a case of a method is, and with which options.

    Attributes:
        method: its entry in `polyattn.testing.families.METHODS`.
        grid, text, valid_text, layer, layers, steps: see `polyattn.video.Place`.
        points: (step, branch) of the calls of one run in order, of which the last one is judged.
        options: of the method by name. full: with these it is dense attention.
    """

    method: str
    grid: tuple[int, int, int]
    text: tuple[int, int] = (0, 0)
    valid_text: tuple[int, int] | None = None
    layer: int = 0
    layers: int = 3
    steps: int = 2
    points: tuple[tuple[int, str], ...] = ((1, ""),)
    options: tuple[tuple[str, Any], ...] = ()
    full: bool = False

    @property
    def words(self) -> list[str]:
        """Return what an id says of it."""
        found = ["grid=" + _word(self.grid), *([f"text={_word(self.text)}"] if any(self.text) else [])]
        found += [f"valid={_word(self.valid_text)}"] if self.valid_text else []
        found += [f"layer={self.layer}", *(f"{step}{branch}" for step, branch in self.points)]
        return [*found, *(f"{name}={_word(value)}" for name, value in self.options), *["full"] * self.full]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Describes what one test of a backend asks. Its `id` says everything that is not usual, and names the random seed.

    Attributes:
        request: as a caller would make it (not in normal form, so that spellings are tested too).
        lengths: (S_q, S_k) of each sequence; a dense batch has equal ones. Empty for requests that are only judged.
        check: `values` against the reference; `decode`, one query against the last row of prefill; `split`, keys in
            parts and merged; `pages`, the same content on other pages; `dropout`, its statistics; `capture`, recorded
            into a device graph and replayed; `refusal`, it must be refused; `witness`, the hook must refuse it;
            `fault`, it runs into a known fault of the library and must be refused.
        storage: of the inputs, see `polyattn.testing.problems.stored`.
        out: the output tensor given: empty = none, `contiguous`, or `strided`.
        sink: `usual`, `dominant` (30 nats above every LSE), or `off` (one is -inf).
        logits: `usual`, of order one wherever a key lies; `late`, they grow with the position of the key, so that a
            maximum over the first keys is none over all; `low` or `high`, LSEs of about -99 or +99.
        mask_shape: which axes of [B, H_q] the mask has: `full`, `batch`, `heads`, `one`, or `expanded` (stride 0).
        mask_dtype: of an additive mask: `same` as the query's, or `float32`.
        closed_rows: the mask hides every key from every fifth query.
        new_rows: paged: the queries' own keys and values are arguments, not yet in the cache.
        parts: of a split: the widths that the keys are cut into; together at least the longest S_k. Shorter
            sequences end before the last ones, and some widths may be 0.
        fields: of a refusal: the fields of which one must be named in a reason.
        place: of a method's case.
    """

    request: AttentionRequest
    lengths: tuple[tuple[int, int], ...] = ()
    check: Check = "values"
    storage: str = "contiguous"
    out: str = ""
    sink: str = "usual"
    logits: str = "usual"
    mask_shape: str = "full"
    mask_dtype: str = "same"
    closed_rows: bool = False
    new_rows: bool = False
    parts: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    place: Placed | None = None

    @property
    def far(self) -> float:
        """How far from 0 the logits lie, in nats."""
        return FAR if self.logits in ("low", "high") else 0.0

    @property
    def longest(self) -> tuple[int, int]:
        """(S_q, S_k), each the longest."""
        return max((q for q, _ in self.lengths), default=0), max((k for _, k in self.lengths), default=0)

    @cached_property
    def id(self) -> str:
        r = self.request
        words = [r.family, r.dtype]
        if self.check != "values":
            words.append(self.check)
        if self.lengths and r.family == "dense":
            words.append(f"B{len(self.lengths)}_S{self.longest[0]}x{self.longest[1]}")
        elif len(self.lengths) > _MANY and len(set(self.lengths)) == 1:
            words.append(f"S{len(self.lengths)}of{self.longest[0]}x{self.longest[1]}")
        elif self.lengths:
            words.append("S" + "_".join(f"{q}x{k}" for q, k in self.lengths))
        words += [f"H{r.heads}x{r.kv_heads}", f"D{r.head_dim}x{r.dims[1]}", *([r.layout] if r.layout == "BHSD" else [])]
        if self.storage != "contiguous":
            words.append(self.storage)
        for name, value in r.active():
            if name not in ("group", "v_head_dim"):
                words.append(name if value is True else f"{name}={_word(value)}")
        if self.sink != "usual":
            words.append(f"sink_{self.sink}")
        if self.logits != "usual":
            words.append(f"logits_{self.logits}")
        words += [f"mask_{word}" for word in (self.mask_shape, self.mask_dtype) if word not in ("full", "same")]
        words += [f"out_{self.out}"] if self.out else []
        words += [name for name in ("closed_rows", "new_rows") if getattr(self, name)]
        words += [f"parts={_word(self.parts)}"] if self.parts else []
        words += self.place.words if self.place else []
        return "-".join(words)

    def __str__(self) -> str:
        return self.id


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return "_".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
