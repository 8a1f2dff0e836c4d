"""Rows of the sheet, their inputs and places, and the calls that are timed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polyattn
from polyattn.methods.video import sla, strategy, svg2, vsa
from polyattn.video import Place


@dataclasses.dataclass(frozen=True)
class Row:
    """A method on a grid: what `at` of a sheet's row says is `must` and `stretch` here.

    Attributes:
        inputs: {} = normal; else centres, strength, spread and region of planted clusters (`planted`).
        layers: whose calls are timed together. samples: places of a strategy file that are.
        density: what the bar is for; 0 = any. branch: a word in the names of a branch's kernels, which are no map.
        attention: names of kernels that are attention itself, beside calls of families.
    """

    name: str
    method: str
    grid: tuple[int, int, int]
    options: Mapping[str, Any]
    small: Mapping[str, Any]
    direction: str = "forward"
    text: tuple[int, int] = (0, 0)
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layers: tuple[int, ...] = (0,)
    samples: int = 0
    density: float = 0.0
    branch: str = ""
    attention: tuple[str, ...] = ()
    must: float | None = None
    stretch: float | None = None
    rest: float | None = None

    @property
    def tokens(self) -> int:
        return math.prod(self.grid) + sum(self.text)

    def tiny(self) -> Row:
        """The row on the grid that is compared with the reference."""
        more = {name: {**getattr(self, name), **self.small.get(name, {})} for name in ("options", "inputs")}
        grid, text = tuple(self.small["grid"]), tuple(self.small.get("text", (0, 0)))
        return dataclasses.replace(self, grid=grid, text=text, samples=min(self.samples, 2), **more)


@dataclasses.dataclass(frozen=True)
class Shape:
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def rows_of(sheet: Mapping[str, Any]) -> list[Row]:
    """The rows of a sheet.

    Raises:
        TypeError: a key that no row has. KeyError: a grid that is not among the sheet's.
    """
    found = []
    for name, given in sheet["rows"].items():
        more = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key != "at"}
        for where, bar in given["at"].items():
            there = sheet["grids"][where]
            must, stretch = bar or (None, None)
            limits = {"must": must, "stretch": stretch, "rest": there["rest"]}
            found.append(Row(f"{name}/{where}", grid=tuple(there["grid"]), **more, **limits))
    return found


# ------------------------------------------------------------------------------------------------------------- inputs


def planted(
    row: Row, shape: Shape, centres: int, strength: float, spread: float, region: Sequence[int], steps: int = 1
) -> list[tuple[Tensor, ...]]:
    """Tokens near centres: strength * centre + spread * noise, for queries and keys apart; values are normal.

    Args:
        centres: how many each head has, of queries and of keys. region: tokens along time, height and width that share
            a centre. steps: sets of inputs, of which each is the first with other noise of a tenth of `spread`.
    """
    draw = torch.Generator(shape.device).manual_seed(0)
    where = {"device": shape.device, "generator": draw}
    T, H, W = (-(-size // step) for size, step in zip(row.grid, region, strict=True))
    front, back = row.text
    sides = []
    for _ in range(2):
        labels = torch.randint(centres, (T, H, W), **where)
        for axis, (size, step) in enumerate(zip(row.grid, region, strict=True)):
            labels = labels.repeat_interleave(step, axis).narrow(axis, 0, size)
        labels = torch.nn.functional.pad(labels.flatten(), (front, back))
        means = strength * torch.randn(centres, shape.heads, shape.head_dim, **where)
        sides.append(means[labels] + spread * torch.randn(row.tokens, shape.heads, shape.head_dim, **where))
    value = torch.randn(row.tokens, shape.heads, shape.head_dim, **where)
    made = []
    for number in range(steps):
        moved = [one + 0.1 * spread * number * torch.randn(one.shape, **where) for one in sides]
        made.append(tuple(one.to(shape.dtype)[None].contiguous() for one in (*moved, value)))
    return made


def normal(row: Row, shape: Shape) -> list[tuple[Tensor, ...]]:
    draw = torch.Generator(shape.device).manual_seed(0)
    size = (1, row.tokens, shape.heads, shape.head_dim)
    return [tuple(torch.randn(size, generator=draw, device=shape.device).to(shape.dtype) for _ in range(3))]


def sets_of(row: Row, shape: Shape) -> list[tuple[Tensor, ...]]:
    """Sets of query, key and value [1, S, H, D]. k-means goes on from step to step: it is given two, by turns."""
    if row.inputs:
        return planted(row, shape, **row.inputs, steps=2 if row.method == svg2.NAME else 1)
    return normal(row, shape)


def learned(row: Row, shape: Shape) -> dict[str, Tensor]:
    """What a model learned for the method."""
    draw = torch.Generator(shape.device).manual_seed(1)
    more = {"generator": draw, "device": shape.device}
    if row.method == vsa.NAME:
        return {vsa.GATE: torch.randn(1, row.tokens, shape.heads, shape.head_dim, **more).to(shape.dtype)}
    if row.method == sla.SLA.name:
        return {sla.WEIGHT: torch.randn(shape.head_dim, shape.head_dim, **more) / shape.head_dim**0.5}
    return {}


def places_of(row: Row, tensors: Mapping[str, Tensor], path: str) -> list[Place]:
    """Where the row's calls are, a place for each."""
    given: dict[str, Any] = {"grid": row.grid, "text": row.text, "tensors": tensors}
    if not row.samples:
        return [Place(**given, layer=layer, layers=60, step=20, steps=50, kept={}) for layer in row.layers]
    file = strategy.read_strategy(path)
    every = list(itertools.product(range(row.options["skip_time_steps"], file.steps), range(file.layers)))
    some = [every[number * len(every) // row.samples] for number in range(row.samples)]
    sizes = {"layers": file.layers, "steps": file.steps}
    return [Place(**given, **sizes, step=step, layer=layer) for step, layer in some]


def small_strategy(row: Row, heads: int, folder: Path) -> str:
    """A file for the small grid: a window for each head, others in each layer."""
    counts = [-(-size // step) for size, step in zip(row.grid, (6, 8, 8), strict=True)]
    some = [[1, 1, counts[2]], [1, counts[1], 1], [counts[0], 1, 1]]
    skip = row.options["skip_time_steps"]
    keys = itertools.product(range(skip + 1), range(2), range(heads))
    path = folder / "strategy.json"
    path.write_text(json.dumps({f"{t}_{layer}_{h}": some[(layer + h) % 3] for t, layer, h in keys}))
    return str(path)


def options_of(row: Row, path: str) -> dict[str, Any]:
    return {**row.options, **({"mask_strategy_file_path": path} if row.samples else {})}


# ------------------------------------------------------------------------------------------------------------ the call


class Call:
    """A row as a model calls it, at all of its places in turn. The options of its method are configured before.

    Attributes:
        places: where it is called. held: bytes of what a call is given.
    """

    def __init__(self, row: Row, shape: Shape, path: str, sets: Sequence[tuple[Tensor, ...]]) -> None:
        self.row, self.settings, self.backward = row, options_of(row, path), row.direction == "backward"
        self.tensors, self.sets = learned(row, shape), list(sets)
        if self.backward:
            self.sets = [tuple(t.detach().requires_grad_() for t in some) for some in sets]
            self.tensors = {name: t.requires_grad_() for name, t in self.tensors.items()}
        self.places = places_of(row, self.tensors, path)
        self.held = sum(t.nbytes for t in (*self.sets[0], *self.tensors.values()))
        self._number = 0
        self._run = self.forward
        if self.backward:
            self._run = backward_of(self.forward, (*self.sets[0], *self.tensors.values()))

    def forward(self) -> Tensor:
        some = self.sets[self._number % len(self.sets)]
        self._number += 1
        for place in self.places:
            out = polyattn.attention(*some, backend=self.row.method, place=place)  # one result at a time has memory
        return out

    def __call__(self) -> Any:
        with torch.set_grad_enabled(self.backward):
            return self._run()


def backward_of(forward: Callable[[], Tensor], wanted: Sequence[Tensor]) -> Callable[[], Any]:
    """The backward pass alone: the first call makes its graph, which is kept."""
    kept: list[tuple[Tensor, Tensor]] = []

    def call() -> Any:
        if not kept:
            out = forward()
            kept.append((out, torch.randn_like(out)))
        ((out, dout),) = kept
        return torch.autograd.grad(out, wanted, dout, retain_graph=True)

    return call


def dense_call(name: str, some: Sequence[Tensor], direction: str) -> Callable[[], Any]:
    """A dense kernel by its name, on the inputs of a row."""
    if direction == "forward":
        return lambda: polyattn.attention(*some, backend=name)
    leaves = tuple(t.detach().requires_grad_() for t in some)
    return backward_of(lambda: polyattn.attention(*leaves, backend=name), leaves)


# --------------------------------------------------------------------------------------------------------- conformance
