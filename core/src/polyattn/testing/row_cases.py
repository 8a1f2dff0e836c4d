"""The cases of one capability row: its values one by one, in pairs, and by themselves."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from ..contract import AttentionRequest, Row, request_fields
from .cases import Case
from .covering import covering
from .families import FAMILIES, Family
from .problems import off_boundary
from .values import CANDIDATES, CONTEXT, FLAGS, declared, inside

__all__ = ["NONE", "RowCases", "holds_here", "request_of"]

_ALONE = ("zero_size", "large", "transform", "dropout", "graph_capture", *sorted(FLAGS))
_KIT: dict[str, tuple[Hashable, ...]] = {
    "storage": ("contiguous", "gapped", "transposed", "expanded", "padded", "misaligned"),
    "out": ("", "contiguous", "strided"),
    "sink": ("usual", "dominant", "off"),
    "mask_shape": ("full", "batch", "heads", "one", "expanded"),
    "mask_dtype": ("same", "float32"),
    "closed_rows": (False, True),
    "new_rows": (False, True),
    "shape": (0, 1, 2),
}
_BATCHES = (2, 1, 3)
_NAMES = frozenset(field.name for field in request_fields())
NONE: Mapping[str, Any] = {}


def holds_here(row: Row, facts: Mapping[str, Any]) -> bool:
    """Return whether a row speaks of this machine at all."""
    named = {**row.allows, **row.when}
    return all(named[name].reason(value) is None for name, value in facts.items() if name in named)


class RowCases:
    """The cases of one row, family and dtype."""

    def __init__(self, row: Row, seed: str, fixed: Mapping[str, Any]) -> None:
        self.row, self.seed, self.fixed = row, seed, fixed
        self.dtype, self.family = fixed["dtype"], shape_of(fixed["family"])
        self.lengths = self.family.lengths
        self.axes = self._axes()
        self.base = {name: values[0] for name, values in self.axes.items() if values}

    def _axes(self) -> dict[str, tuple[Hashable, ...]]:
        skip = {*CONTEXT, *_ALONE, "family", "dtype", "misaligned"}
        axes = {name: self._made(name) for name in CANDIDATES if name not in skip}
        pairs = [c for c in (self.row.when.get("dims"), self.row.allows.get("dims")) if c is not None]
        if pairs:
            axes["dims"] = tuple(v for v in getattr(pairs[0], "values", ()) if isinstance(v, tuple))
        if not self.family.drafts:
            masked = True in axes.pop("tree") and "bool" in axes["mask"]
            if masked and {"fewer", "equal"} & set(axes["s_relation"]):
                axes["mask"] = (*axes["mask"], "tree")
        axes.update(_KIT)
        axes["layout"], axes["batch"] = self.family.layouts, _BATCHES if self.family.batched else _BATCHES[:1]
        if True not in inside("misaligned", self.row):
            axes["storage"] = tuple(s for s in _KIT["storage"] if s not in ("padded", "misaligned"))
        return self.family.axes(axes)

    def _made(self, name: str) -> tuple[Hashable, ...]:
        unmade = self.family.unmade.get(name, ())
        return tuple(value for value in inside(name, self.row) if value not in unmade)

    @property
    def possible(self) -> bool:
        """Return whether there is any case at all: each field has a value that the kit can make tensors of."""
        return all(self.axes.values())

    def combined(self, count: int) -> list[Case]:
        """Fields in combinations that cover all pairs of values."""
        made = covering(self.axes, self._repair, count, self.seed)
        return [case for values in made if (case := self._case(values)) is not None]

    def alone(self) -> Iterator[Case]:
        """Fields that are tried by themselves: flags, and what changes the kind of check."""
        for name in sorted(FLAGS):
            if True in inside(name, self.row):
                yield from self.variants({}, {name: True})
        plain: dict[str, Any] = {"head_dim": 40, "v_head_dim": 24, "group": 4, "causal": "bottom_right"}
        trained: dict[str, Any] = {"grad": ("query", "key", "value")}
        for mask in self.axes["mask"]:
            # A kernel reads a mask in tiles: over more keys than one holds.
            if mask in ("bool", "additive"):
                yield from self.variants({"mask": mask, **self._most_keys()}, {}, wish=plain)
        if True in inside("zero_size", self.row):
            for (relation, lengths), lse in itertools.product(self.family.empty.items(), (False, True)):
                for grad in ({"grad": ()}, trained):
                    asked = {"s_relation": relation, "lse": lse, **grad}
                    yield from self.variants(asked, {"zero_size": True}, wish=plain, lengths=lengths)
        for transform in inside("transform", self.row):
            if transform != "":
                for lse in (False, True):
                    yield from self.variants({"lse": lse}, {"transform": transform}, wish=plain)
        for dropout in inside("dropout", self.row):
            ways: tuple[Mapping[str, Any], ...] = ({}, plain, {"lse": True}, trained, {**plain, **trained})
            for more in (*ways, {"mask": "bool"}) if dropout != 0.0 else ():
                asked = {"shape": self._most_rows(), **more}
                yield from self.variants(asked, {"dropout": dropout}, check="dropout")
        recorded = inside("graph_capture", self.row)
        if True in recorded:
            for more in ({}, plain, {**plain, "mask": "bool"}, {"mask": "additive"}, {"lse": True}, {"sinks": True}):
                yield from self.variants(more, {"graph_capture": True}, check="capture")
        if "session" in recorded:
            # Where a call by itself can be recorded too, a step is one more way to the same kernels.
            yield from itertools.islice(self.family.recorded(self.variants), 1 if True in recorded else None)

    def _most_rows(self) -> int:
        """The shape with most queries: statistics need them."""
        shapes = self.family.lengths[str(self.base["s_relation"])]
        return max(range(len(shapes)), key=lambda i: sum(s_q for s_q, _ in shapes[i]))

    def _most_keys(self) -> dict[str, Hashable]:
        """The relation and the shape with the longest row of keys."""
        found = [
            (max(s_k for _, s_k in lengths), str(relation), -shape)
            for relation in self.axes["s_relation"]
            for shape, lengths in enumerate(self.family.lengths[str(relation)])
        ]
        _, relation, shape = max(found)
        return {"s_relation": relation, "shape": -shape}

    def relations(self) -> Iterator[Case]:
        """Two ways to the same numbers."""
        return self.family.relations(self.variants, random.Random(f"{self.seed} relations"))

    def variants(
        self, asked: Mapping[str, Any], extra: Mapping[str, Any], /, wish: Mapping[str, Any] = NONE, **changes: Any
    ) -> list[Case]:
        """The case of these values, or none where the row does not take them. See `families.base.Variants`."""
        granted = {name: value for name, value in wish.items() if value in self.axes.get(name, ())}
        wanted = {name: value for name, value in {**granted, **asked}.items() if name in self.axes}
        if any(value not in self.axes[name] for name, value in wanted.items()):
            return []
        values = self._repair({**self.base, **wanted})
        case = None if values is None else self._case(values, extra, **changes)
        return [] if case is None else [case]

    def _repair(self, values: dict[str, Hashable]) -> dict[str, Hashable] | None:
        """Make values that were chosen one by one into one request that a caller could make."""
        v: dict[str, Any] = dict(values)
        if "dims" in v:
            v["head_dim"], v["v_head_dim"] = v["dims"]
        if v["mask"] == "tree":
            v |= {"mask_shape": "one", "closed_rows": False, "causal": "none", "window": (-1, -1), "chunk": 0}
            v["s_relation"] = "equal" if v["s_relation"] == "equal" else "fewer"
            # A tree belongs to one prefix: sequences of one length.
            v["shape"] = 1
        if v["mask"] == "none":
            v |= {"mask_shape": "full", "closed_rows": False}
        if v["mask"] != "additive" or self.dtype in ("float32", "float64"):
            v["mask_dtype"] = "same"
        if not v["sinks"]:
            v["sink"] = "usual"
        unused = {"mask": v["mask"] != "additive", "sinks": not v["sinks"], "lse": True}
        v["grad"] = tuple(name for name in v["grad"] if not unused.get(name, False))
        if v["grad"] and v["lse"]:
            v["grad"] = (*v["grad"], "lse")
        if v["grad"]:
            v["out"] = ""
        v = self.family.repaired(v)
        if _narrow(v):
            # A relative error over a handful of numbers says nothing: so few rows, or, where a dominant sink leaves few
            # rows any weight, so few that count.
            v["shape"] = min(v["shape"], 1)
            v["sink"] = "usual" if v["sink"] == "dominant" else v["sink"]
        v["shape"] %= len(self.lengths[v["s_relation"]])
        return v if self._case(v) is not None else None

    def _case(self, values: Mapping[str, Any], extra: Mapping[str, Any] | None = None, **changes: Any) -> Case | None:
        v = dict(values)
        lengths = self.lengths[v["s_relation"]][v["shape"]]
        if self.family.batched:
            # The largest of a handful of errors is a matter of luck: rows enough for a fair comparison.
            # Of a single channel the whole error of INT8 scores is one draw, 15% as well as 3%: more samples.
            narrow = _narrow(v)
            few = 16 if narrow else 4
            lengths = lengths * (v["batch"] if lengths[0][0] > 2 and not narrow else few + v["batch"])
        own = {name: v[name] for name in (*_KIT, "logits") if name != "shape" and name in v}
        request = request_of({**v, **self.fixed, **(extra or {})})
        case = Case(**{"request": request, "lengths": lengths, **own, **changes})
        if off_boundary(case):
            case = dataclasses.replace(case, request=dataclasses.replace(request, misaligned=True))
        return case if declared([self.row], case.request.normalised()) else None


def _narrow(values: Mapping[str, Any]) -> bool:
    """Return whether an output, or a logit, is of so few numbers that its error is a matter of luck."""
    return bool({values["head_dim"], values["v_head_dim"] or 64} & {1, 2})


def shape_of(family: str) -> Family:
    """The family's entry. A family without one is only judged: any heads and layout do."""
    return FAMILIES.get(family, FAMILIES["varlen"])


def request_of(values: Mapping[str, Any]) -> AttentionRequest:
    """A request from one value per field."""
    v = dict(values)
    group, family = v.get("group", 1), shape_of(v["family"])
    v.setdefault("kv_heads", family.kv_heads(group))
    v["heads"] = group * v["kv_heads"]
    v.setdefault("layout", family.layouts[0])
    if v.get("scale") is not None:
        v["scale"] = round(v["scale"] * v["head_dim"] ** -0.5, 6)
    if v.get("mask") == "tree":
        v |= {"mask": "bool", "tree": True}
    return AttentionRequest(**{name: value for name, value in v.items() if name in _NAMES})
