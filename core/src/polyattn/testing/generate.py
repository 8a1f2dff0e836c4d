"""From capability rows to cases: everything that is declared is tried, and what lies just outside must be refused."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ..records import AttentionRequest, Row, request_fields
from .cases import Case
from .covering import covering
from .problems import off_boundary
from .values import CANDIDATES, CONTEXT, FLAGS, candidates, declared, inside

__all__ = ["LEVELS", "Level", "generate", "refusals"]

Level = Literal["quick", "full"]
LEVELS: Mapping[Level, int] = {"quick": 80, "full": 500}
"""Cases of combined fields for each capability row and dtype. 80 cover nearly all pairs of values."""

Lengths = tuple[tuple[int, int], ...]

_DENSE: dict[str, tuple[tuple[int, int], ...]] = {
    "equal": ((63, 63), (100, 100), (1, 1)),
    "one": ((1, 100), (1, 63), (1, 2)),
    "fewer": ((63, 100), (7, 64), (2, 65)),
    "more": ((100, 63), (37, 5), (64, 1)),
}
"""(S_q, S_k) by relation: odd, at and around a tile of 64, and the smallest."""

_RAGGED: dict[str, tuple[Lengths, ...]] = {
    "equal": (((63, 63), (0, 0), (100, 100), (1, 1)), ((17, 17),), ((64, 64), (65, 65), (0, 0))),
    "one": (((1, 63), (1, 1), (1, 100)), ((1, 5),) * 5, ((1, 64), (0, 7), (1, 0), (1, 33), (1, 65))),
    "fewer": (((63, 100), (1, 2), (7, 64)), ((5, 65),), ((0, 3), (16, 17))),
    "more": (((63, 100), (0, 5), (5, 0), (100, 37), (1, 1)), ((64, 63),), ((37, 5), (2, 65))),
}
"""Packed batches with sequences of no queries, of no keys, of neither. `more` stands for any mixture (see dispatch)."""

_CACHED: dict[str, tuple[Lengths, ...]] = {
    "equal": (((17, 17), (1, 1), (40, 40)), ((5, 5),)),
    "one": (((1, 63), (1, 0), (1, 1), (1, 100)), ((1, 5),) * 5),
    "fewer": (((7, 64), (1, 9), (33, 100)), ((4, 37),)),
    "more": (((7, 64), (5, 5)), ((3, 3), (4, 37))),
}
"""Batches over a cache: the queries are the last tokens of their sequences, so there are never more of them. A sequence
of no tokens is a padding row: it has a query, which sees nothing."""

_ALONE = ("zero_size", "large", "transform", "dropout", "graph_capture", *sorted(FLAGS))
_KIT: dict[str, tuple[Hashable, ...]] = {
    "layout": ("BSHD", "BHSD"),
    "storage": ("contiguous", "gapped", "transposed", "expanded", "padded", "misaligned"),
    "out": ("", "contiguous", "strided"),
    "sink": ("usual", "dominant", "off"),
    "mask_shape": ("full", "batch", "heads", "one", "expanded"),
    "mask_dtype": ("same", "float32"),
    "closed_rows": (False, True),
    "new_rows": (False, True),
    "shape": (0, 1, 2),
    "batch": (2, 1, 3),
}


def generate(
    rows: Sequence[Row],
    facts: Mapping[str, Any],
    *,
    families: Sequence[str],
    dtypes: Sequence[str],
    per_row: int,
) -> list[Case]:
    """The cases that a backend must serve.

    Args:
        rows: its capability. facts: the machine as request fields (platform, arch, toolkit, features).
        families, dtypes: those to look at. per_row: cases of combined fields for each row and dtype.
    """
    found: dict[str, Case] = {}
    for index, row in enumerate(rows):
        for family, dtype in itertools.product(inside("family", row), inside("dtype", row)):
            if family not in families or dtype not in dtypes or not _holds_here(row, facts):
                continue
            maker = _RowCases(row, f"{family} {dtype} {index}", {**facts, "family": family, "dtype": dtype})
            # Where programs are compiled one by one, relations are few too.
            relations = itertools.islice(maker.relations(), None if per_row >= 40 else 3)
            for case in itertools.chain(maker.combined(per_row), maker.alone(), relations):
                found.setdefault(case.id, case)
    return list(found.values())


def _holds_here(row: Row, facts: Mapping[str, Any]) -> bool:
    named = {**row.allows, **row.when}
    return all(named[name].reason(value) is None for name, value in facts.items() if name in named)


class _RowCases:
    """The cases of one row, family and dtype."""

    def __init__(self, row: Row, seed: str, fixed: Mapping[str, Any]) -> None:
        self.row, self.seed, self.fixed = row, seed, fixed
        self.family, self.dtype = fixed["family"], fixed["dtype"]
        self.axes = self._axes()
        self.base = {name: values[0] for name, values in self.axes.items()}

    def _axes(self) -> dict[str, tuple[Hashable, ...]]:
        skip = {*CONTEXT, *_ALONE, "family", "dtype", "misaligned"}
        axes = {name: inside(name, self.row) for name in CANDIDATES if name not in skip}
        pairs = [c for c in (self.row.when.get("dims"), self.row.allows.get("dims")) if c is not None]
        if pairs:
            axes["dims"] = tuple(v for v in getattr(pairs[0], "values", ()) if isinstance(v, tuple))
        if True in axes.pop("tree") and "bool" in axes["mask"] and {"fewer", "equal"} & set(axes["s_relation"]):
            axes["mask"] = (*axes["mask"], "tree")
        axes.update(_KIT)
        if True not in inside("misaligned", self.row):
            axes["storage"] = tuple(s for s in _KIT["storage"] if s not in ("padded", "misaligned"))
        for name, families in (("layout", ("dense",)), ("batch", ("dense",)), ("new_rows", ("paged",))):
            if self.family not in families:
                axes[name] = _KIT[name][:1]
        if self.family in ("paged", "mla"):
            axes["storage"] = tuple(s for s in axes["storage"] if s != "expanded")  # of the queries; caches are whole
            axes["page_size"] = tuple(n for n in axes["page_size"] if n != 0)
        if self.family == "mla":
            axes["scale"] = tuple(v for v in axes["scale"] if v is not None)
            axes["v_head_dim"] = tuple(v for v in (24, 0, 64) if v in axes["v_head_dim"])
        return {name: values for name, values in axes.items() if values}

    def combined(self, count: int) -> list[Case]:
        made = covering(self.axes, self._repair, count, self.seed)
        return [case for values in made if (case := self._case(values)) is not None]

    def alone(self) -> Iterator[Case]:
        """Fields that are tried by themselves: flags, and what changes the kind of check."""
        for name in sorted(FLAGS):
            if True in inside(name, self.row):
                yield from self._variants({}, {name: True})
        plain: dict[str, Any] = {"head_dim": 40, "v_head_dim": 24, "group": 4, "causal": "bottom_right"}
        if True in inside("zero_size", self.row):
            nothing: Lengths = () if self.family == "dense" else ((0, 0),)
            empty: dict[str, Lengths] = {"equal": nothing, "fewer": ((0, 7),), "more": ((5, 0),)}
            for (relation, lengths), lse in itertools.product(empty.items(), (False, True)):
                for grad in ((), ("query", "key", "value")):
                    asked = {**plain, "s_relation": relation, "lse": lse, "grad": grad}
                    yield from self._variants(asked, {"zero_size": True}, lengths=lengths)
        for transform in inside("transform", self.row):
            if transform != "":
                for lse in (False, True):
                    yield from self._variants({**plain, "lse": lse}, {"transform": transform})
        # Statistics need rows: the longest shapes.
        shape: dict[str, Any] = {"shape": 1 if self.family == "dense" else 0}
        trained: dict[str, Any] = {"grad": ("query", "key", "value")}
        for dropout in inside("dropout", self.row):
            for more in ({"lse": True}, trained, {**plain, **trained}, {"mask": "bool"}) if dropout != 0.0 else ():
                yield from self._variants({**shape, **more}, {"dropout": dropout}, check="dropout")
        if True in inside("graph_capture", self.row):
            for more in ({}, plain, {**plain, "mask": "bool"}, {"mask": "additive"}, {"lse": True}, {"sinks": True}):
                yield from self._variants(more, {"graph_capture": True}, check="capture")

    def relations(self) -> Iterator[Case]:
        """Two ways to the same numbers: the last row of prefill by decode, and keys in two parts, merged."""
        if self.family == "dense":
            yield from itertools.chain.from_iterable(zip(self._split(), self._decode(), strict=False))
            yield from itertools.islice(self._split(), 4, None)
        elif self.family == "varlen":
            yield from self._decode()
        else:
            yield from self._steps()

    def _steps(self) -> Iterator[Case]:
        """The steps of an engine, as the public calls say them."""
        phases = (("decode", "one"), ("extend", "fewer"))
        for (phase, relation), saved, layout in itertools.product(phases, (True, False), ("NHD", "HND")):
            asked = {"phase": phase, "s_relation": relation, "shape": 0, "group": 4, "causal": "bottom_right"}
            if self.family == "paged":
                asked |= {"save_kv_cache": saved, "kv_layout": layout, "page_size": 16}
            yield from self._variants(asked, {})

    def _decode(self) -> Iterator[Case]:
        for group, window in itertools.product((4, 1), ((17, -1), (-1, -1))):
            asked = {"group": group, "causal": "bottom_right", "window": window, "s_relation": "equal", "shape": 0}
            if self._variants({**asked, "s_relation": "one"}, {}):
                yield from self._variants(asked, {}, check="decode")

    def _split(self) -> Iterator[Case]:
        kinds = itertools.product((("query", "key", "value"), ()), ("none", "bool"), (4, 1), ("usual", "dominant"))
        for grad, mask, group, sink in kinds:
            asked = {"group": group, "grad": grad, "mask": mask, "lse": True, "v_head_dim": 24}
            asked["closed_rows"] = mask == "bool"
            parts = [self._variants({**asked, "s_relation": relation}, {}) for relation in ("equal", "more")]
            if all(parts):
                whole = {**asked, "s_relation": "fewer"}
                yield from self._variants(whole, {}, lengths=((63, 100),) * 2, check="split", sink=sink)

    def _variants(self, asked: Mapping[str, Any], extra: Mapping[str, Any], **changes: Any) -> list[Case]:
        """The case of these values, or none where the row does not take them."""
        wanted = {name: value for name, value in asked.items() if name in self.axes}
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
        if v["save_kv_cache"]:
            v["new_rows"] = True
        if self.family == "mla" and v["v_head_dim"] > v["head_dim"]:
            v["v_head_dim"] = 0
        if {v["head_dim"], v["v_head_dim"] or 64} & {1, 2}:
            v["shape"] = min(v["shape"], 1)  # a relative error over a handful of numbers says nothing
        v["shape"] %= len(self._shapes(v["s_relation"]))
        return v if self._case(v) is not None else None

    def _shapes(self, relation: str) -> Sequence[Any]:
        if self.family == "dense":
            return _DENSE[relation]
        return (_RAGGED if self.family == "varlen" else _CACHED)[relation]

    def _case(self, values: Mapping[str, Any], extra: Mapping[str, Any] | None = None, **changes: Any) -> Case | None:
        v = dict(values)
        lengths = self._shapes(v["s_relation"])[v["shape"]]
        if self.family == "dense":
            # The largest of a handful of errors is a matter of luck: rows enough for a fair comparison.
            lengths = (lengths,) * (v["batch"] if lengths[0] > 2 else 4 + v["batch"])
        own = {name: v[name] for name in _KIT if name not in ("layout", "shape", "batch")}
        request = _request({**v, **self.fixed, **(extra or {})})
        case = Case(**{"request": request, "lengths": lengths, **own, **changes})
        if off_boundary(case):
            case = dataclasses.replace(case, request=dataclasses.replace(request, misaligned=True))
        return case if declared([self.row], case.request.normalised()) else None


def _request(values: Mapping[str, Any]) -> AttentionRequest:
    """A request from one value per field."""
    v = dict(values)
    group = v.get("group", 1)
    # One key head at the largest group: that is multi-query attention; a cache scaled by head needs two of them.
    v["kv_heads"] = 1 if v["family"] == "mla" or (group == 8 and v["family"] != "paged") else 2
    v["heads"] = group * v["kv_heads"]
    if v.get("scale") is not None:
        v["scale"] = round(v["scale"] * v["head_dim"] ** -0.5, 6)
    if v["family"] != "dense":
        v["layout"] = "THD"
    if v.get("mask") == "tree":
        v |= {"mask": "bool", "tree": True}
    names = {f.name for f in request_fields()}
    return AttentionRequest(**{name: value for name, value in v.items() if name in names})


_NAMED_AS = {
    "head_dim": ("head_dim", "dims"),
    "v_head_dim": ("v_head_dim", "dims"),
    "window": ("window", "causal"),
    "causal": ("causal", "window"),
}
"""What a reason may call a field: pairs of widths are one limit, and (0, 0) is a causal window (normal form)."""


def refusals(
    rows: Sequence[Row], facts: Mapping[str, Any], *, families: Sequence[str], dtypes: Sequence[str], pairs: int = 60
) -> list[Case]:
    """The cases that a backend must refuse.

    Each value of each field that no row takes, families included, and at most `pairs` pairs of values for each row that
    rows take apart but not together. Arguments as `generate`.
    """
    found: dict[AttentionRequest, Case] = {}
    here = [row for row in rows if _holds_here(row, facts)]
    served = {family: [row for row in here if family in inside("family", row)] for family in CANDIDATES["family"]}
    for family in families:
        if not served[family]:
            request = _request({**facts, "family": family, "dtype": dtypes[0], "head_dim": 64})
            found[request] = Case(request=request, check="refusal", fields=("family",))
        for row in served[family]:
            mine = [dtype for dtype in inside("dtype", row) if dtype in dtypes]
            if mine:
                for case in _beyond(row, rows, {**facts, "family": family, "dtype": mine[0]}, pairs):
                    found.setdefault(case.request.normalised(), case)
    return list(found.values())


def _beyond(row: Row, rows: Sequence[Row], fixed: Mapping[str, Any], pairs: int) -> Iterator[Case]:
    base = {**_RowCases(row, "", fixed).base, **fixed}
    if "dims" in base:
        base["head_dim"], base["v_head_dim"] = base["dims"]
    usual = _request(base).normalised()

    def case(**changes: Hashable) -> Case | None:
        request = _request({**base, **changes})
        if declared(rows, request.normalised()):
            return None
        fields = tuple(n for name in changes for n in _NAMED_AS.get(name, (name,)))
        return Case(request=request, check="refusal", fields=fields)

    taken: list[tuple[str, Hashable]] = []
    for name in CANDIDATES:
        for value in candidates(name, rows) if name != "family" else ():
            if _request({**base, name: value}).normalised() == usual:
                continue
            if refused := case(**{name: value}):
                yield refused
            else:
                taken.append((name, value))
    together = ({a: x, b: y} for (a, x), (b, y) in itertools.combinations(taken, 2) if a != b)
    refused_pairs = [refused for changes in together if (refused := case(**changes))]
    yield from random.Random(repr(usual)).sample(refused_pairs, min(pairs, len(refused_pairs)))
