"""This module reports who served the attention of a pipeline, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...dispatch.placed import explain
from ...errors import ConfigError
from ...selection.select import Selection
from .components import Component, Prepared, prepared
from .places import Part, Told

__all__ = ["PipelineReport", "Row", "report", "told"]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row is about calls of one component that are served alike.

    Attributes:
        component: as in model_index.json. layers: numbers of the blocks, empty = attention beside them. role: "self" or
            "cross". backend, source, why: who served, who decided and for which reason. calls: how many.
        method: the method of sparse attention that was asked for, "" = none; density: share of its pairs, None = not
            said.
    """

    component: str
    layers: tuple[int, ...]
    role: str
    backend: str
    source: str
    why: str
    calls: int
    method: str = ""
    density: float | None = None

    @property
    def where(self) -> str:
        """The layers in words."""
        return f"layers {_spans(self.layers)}" if self.layers else "beside the blocks"

    def __str__(self) -> str:
        calls = f"{self.calls} call{'s' * (self.calls != 1)}"
        if self.method:
            share = "" if self.density is None else f", density {self.density:.3g}"
            return f"{self.component} {self.role}, {self.where}: {calls}, {self.method}{share}; {self.backend}"
        return f"{self.component} {self.role}, {self.where}: {calls}, {self.backend} by {self.source}: {self.why}"


@dataclasses.dataclass(frozen=True)
class PipelineReport:
    """What the last run of a prepared pipeline did.

    Attributes:
        components: every component that is a model. rows: of those that polyattn serves and that ran.
    """

    components: tuple[Component, ...]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        heads = [f"{one.name} ({one.kind}): {one.why}" for one in self.components]
        return "\n".join([*heads, *map(str, self.rows)])


def report(pipe: Any, **call: Any) -> PipelineReport:
    """Say who served the attention of a pipeline in its last run, and why.

    Args:
        pipe: a pipeline that was given to `prepare`.
        call: arguments of a run that is made first, `prompt="a cat", num_inference_steps=1` for example.

    Raises:
        ConfigError: the pipeline was not prepared, or no call of it reached polyattn yet.
    """
    done = prepared(pipe)
    if done is None:
        raise ConfigError("report() needs a prepared pipeline: polyattn.integrations.diffusers.prepare(pipe) first")
    if call:
        pipe(**call)
    found = told(done)
    if not found.rows and not any(part.ran and not part.told for part in done.parts):
        raise ConfigError(
            "no call of the pipeline has reached polyattn yet: run it, or give report() the arguments of a run, "
            'such as prompt="a cat", num_inference_steps=1'
        )
    return found


def told(done: Prepared) -> PipelineReport:
    """Make the report of what a prepared pipeline did until now, which may be nothing."""
    compiled = {part.name for part in done.parts if part.ran and not part.told}
    aside = "; compiled, and compiled code does not say who serves it: ask before it is compiled"
    components = (
        dataclasses.replace(one, why=f"{one.why}{aside}") if one.name in compiled else one for one in done.components
    )
    return PipelineReport(tuple(components), tuple(row for part in done.parts for row in _rows(part, done.source)))


def _rows(part: Part, who: str) -> list[Row]:
    found: dict[tuple[Any, ...], list[tuple[int | None, int]]] = {}
    for key, kept in part.told.items():
        if kept.place is not None and part.pretend is None:
            continue  # the run knows these better, from method to kernel
        chosen = selection_of(kept)
        # What rules of the pipeline name reaches selection as an argument, which nobody gave.
        source = chosen.source if kept.backend is None else chosen.source.replace("argument", who)
        why = chosen.why if kept.backend is None else chosen.why.replace("by argument", f"by {who}")
        method, kernels = "", chosen.id
        if kept.place is not None and chosen.rule:
            method, kernels = chosen.rule, f"{chosen.request.family}: {kernels}, left dense by a rule: {why}"
        elif chosen.inner:
            method, kernels = chosen.backend, ", ".join(f"{one.request.family}: {one.id}" for one in chosen.inner)
        alike: tuple[Any, ...] = (kept.scope[2], kernels, source, why, method, None, key[0] is None)
        found.setdefault(alike, []).append((key[0], kept.calls))
    for row in part.run.explain().rows:
        what = f"{', '.join(row.kernels)}" + (f", left dense by a rule: {row.why}" if row.why else "")
        density = None if row.why or row.density is None else round(row.density, 3)
        alike = row.role, what, "", row.why, row.method, density, row.layer is None
        found.setdefault(alike, []).append((row.layer, row.calls))
    return [
        Row(
            part.name,
            tuple(sorted({layer for layer, _ in calls if layer is not None})),
            role,
            backend,
            source,
            why,
            sum(count for _, count in calls),
            method,
            density,
        )
        for (role, backend, source, why, method, density, _), calls in found.items()
    ]


def selection_of(told: Told) -> Selection:
    """Ask again who serves calls that were made before; nothing is run."""
    with FakeTensorMode():
        tensors: Any = tuple(
            None if one is None else torch.empty(one[0], dtype=one[1], device=one[2]) for one in told.tensors
        )
    return explain((*tensors, None, None), told.static, told.backend, told.scope, told.place)


def _spans(numbers: tuple[int, ...]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
