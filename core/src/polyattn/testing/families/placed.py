"""Calls of the family `dense` with a place, which a method serves: what all methods share."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ... import epoch
from ...contract import AttentionRequest, Place
from ...dispatch.dense import attention
from ...selection import overrides
from ...video import Run, place
from ..cases import Case, Placed
from .base import Call, Part
from .dense import Dense

if TYPE_CHECKING:
    from ..problems import Maker

__all__ = ["Called", "PlacedCalls", "leveled", "repeated"]

_LEVELS = 2.0
"""Keys that are ranked by their groups lie between minus this and this along the first axis of a head."""


class Called(NamedTuple):
    """What a method's mathematics needs beside query, key and value. `dtype`: in which it is computed."""

    family: PlacedCalls
    case: Case
    learned: Mapping[str, Tensor]

    @property
    def at(self) -> Placed:
        assert self.case.place is not None
        return self.case.place

    @property
    def options(self) -> dict[str, Any]:
        return {**self.family.defaults, **dict(self.at.options)}


def _exactly(q: Tensor, k: Tensor, v: Tensor, call: Called, sinks: None, request: AttentionRequest) -> Any:
    out = call.family.computed(q, k, v, call, torch.float64)
    return out, out.new_zeros(out.shape[:3])


def _plainly(q: Tensor, k: Tensor, v: Tensor, call: Called, sinks: None, request: AttentionRequest) -> Any:
    out = call.family.computed(q, k, v, call, q.dtype)
    return out, out.new_zeros(out.shape[:3])


class PlacedCalls(Dense):
    """Describes one method, as `Family` does a family.

    What a method chooses hangs on scores. Its inputs are made so that no two of them are close (`groups`): whoever
    rounds otherwise chooses the same, and the map is compared through the output.

    Attributes:
        grid: of all cases. text, padding: whether a place may have text, and some of it be padding.
        choices: options to try. dense: options with which the method is dense attention, None = it never is.
        untried: what no case tries, each as a sentence.
        defaults: the method's options, which a case changes.
    """

    says = Dense.says
    exact = staticmethod(_exactly)
    plain = staticmethod(_plainly)
    terms = None
    grid: ClassVar[tuple[int, int, int]] = (5, 9, 6)
    text: ClassVar[bool] = True
    padding: ClassVar[bool] = True
    choices: ClassVar[tuple[Mapping[str, Any], ...]]
    dense: ClassVar[Mapping[str, Any] | None] = None
    defaults: ClassVar[Mapping[str, Any]] = {}
    untried: ClassVar[tuple[str, ...]] = ()

    # --- what a method says of itself

    def computed(self, q: Tensor, k: Tensor, v: Tensor, call: Called, dtype: torch.dtype) -> Tensor:
        """The method by its definition: attention under its mask, and what is added to that. q: [B, H_q, S, D]."""
        return masked(q, k, v, self.mask(q, k, call).to(q.device), call.case.request.softmax_scale, dtype)

    def mask(self, q: Tensor, k: Tensor, call: Called) -> Tensor:
        """bool [B|1, H_q|1, S, S], True = the query sees the key."""
        raise NotImplementedError(f"{type(self).__name__} has neither `mask` nor `computed`")

    def groups(self, case: Case, name: str) -> Tensor | None:
        """int64 [S], the group of each token of the query or key whose means are compared, -1 = none; None = no choice
        hangs on it."""
        return None

    def needs(self, case: Case, maker: Maker) -> dict[str, Tensor]:
        """Tensors that the model learned."""
        return {}

    # --- what a family says

    def shaped(self, case: Case, name: str, values: Tensor) -> Tensor:
        groups = self.groups(case, name) if name in ("query", "key") else None
        if groups is None:
            return values
        turned = case.request.layout == "BSHD"
        rows = values.transpose(1, 2) if turned else values
        rows = leveled(rows, groups, name, zlib.crc32(f"{case.id} {name}".encode()))
        return rows.transpose(1, 2) if turned else rows

    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        tensors, extra = super().make(case, maker)
        learned: dict[str, Tensor | None] = {**self.needs(case, maker)}
        return {**tensors, **learned}, extra

    def differentiated(self, case: Case) -> list[str]:
        names = super().differentiated(case)
        return [*names, *self.learnt(case)] if names else names

    def learnt(self, case: Case) -> tuple[str, ...]:
        """Names of what `needs` makes."""
        return ()

    def public(self, call: Call) -> tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]:
        _, positional, keywords = super().public(call)
        assert call.case.place is not None
        learned = {name: call.tensors[name] for name in self.learnt(call.case)}
        return functools.partial(_at, call.case.place, learned), positional, keywords

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        learned = {name: tensors[name] for name in self.learnt(case)}
        for q, k, v, _ in super().parts(case, tensors, extra):
            yield q, k, v, Called(self, case, learned)

    @contextlib.contextmanager
    def settled(self, case: Case, backend: str) -> Iterator[None]:
        assert case.place is not None
        before = overrides.current_settings()
        overrides.add_options("polyattn.testing", {backend: self.configured(case)})
        try:
            yield
        finally:
            overrides._process.settings = before
            epoch.bump()

    def configured(self, case: Case) -> dict[str, Any]:
        """Options as the process is configured with them."""
        assert case.place is not None
        return {**self.defaults, **dict(case.place.options)}


def _at(at: Placed, learned: Mapping[str, Tensor], *tensors: Tensor, out: Tensor | None = None, **given: Any) -> Any:
    """The call at the last point of its run, after those before it. Another branch has the samples in another order."""
    fields: dict[str, Any] = {"grid": at.grid, "text": at.text, "valid_text": at.valid_text}
    *before, (step, branch) = at.points
    if not before:
        more: dict[str, Any] = {
            "layer": at.layer,
            "layers": at.layers,
            "step": step,
            "steps": at.steps,
            "branch": branch,
        }
        return attention(*tensors, out=out, **given, place=Place(**fields, **more, tensors=learned))
    with Run(steps=at.steps, layers=at.layers) as run:
        for earlier, other in before:
            some = tensors if other == branch else tuple(t.flip(0) for t in tensors)
            with torch.no_grad(), run.at(**fields, step=earlier, branch=other):
                attention(*some, **given, place=place(layer=at.layer, tensors=learned))
        with run.at(**fields, step=step, branch=branch):
            return attention(*tensors, out=out, **given, place=place(layer=at.layer, tensors=learned))


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Attention under a mask, every step in one dtype. All tensors are heads first."""
    k, v = repeated(q, k), repeated(q, v)
    logits = (q.to(dtype) @ k.to(dtype).mT * scale).masked_fill(~mask, float("-inf"))
    out: Tensor = logits.softmax(-1) @ v.to(dtype)
    return out


def repeated(query: Tensor, shared: Tensor) -> Tensor:
    """Keys or values [B, H_kv, S, D] for each query head."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], 1)


def leveled(rows: Tensor, groups: Tensor, name: str, seed: int) -> Tensor:
    """Values whose means over groups are 0 but along the first axis.

    There keys have a level of their group, evenly spaced and in another order in each head, and queries 1 or -1, so
    that products of means are evenly spaced too.

    Args:
        rows: [B, H, S, D]. groups: int64 [S], -1 = of none.
    """
    draw, count = torch.Generator().manual_seed(seed), int(groups.max()) + 1
    inside, own = groups >= 0, groups.clamp(min=0)
    members = torch.nn.functional.one_hot(own, count).to(rows.dtype) * inside[:, None]
    means = torch.einsum("bhsd,sc->bhcd", rows, members) / members.sum(0).clamp(min=1)[:, None]
    rows = rows - means[:, :, own] * inside[:, None]
    if name == "key":
        order = torch.rand(*rows.shape[:2], count, generator=draw).argsort(-1)
        levels = torch.linspace(-_LEVELS, _LEVELS, count)[order]
    else:
        levels = torch.randint(0, 2, (*rows.shape[:2], count), generator=draw) * 2.0 - 1
    rows[..., 0] = torch.where(inside, levels[:, :, own], rows[..., 0])
    return rows
