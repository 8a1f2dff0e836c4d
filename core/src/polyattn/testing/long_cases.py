"""Cases over several tiles of a kernel, of more heads than a grid holds, and of logits far from 0.

Most cases are no longer than one tile, so that there can be many. What a kernel does from one tile to the next (it
rescales what it has so far, finds the first and the last tile of a window, adds up gradients) shows in longer ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from .cases import Case
from .covering import covering
from .families import Lengths
from .row_cases import RowCases
from .values import taken

__all__ = ["GRID", "LongCases", "brief", "far", "one_far", "wide"]

GRID = 65_535
"""Most blocks along the second and third axis of a CUDA grid."""

_BRIEF = {"fewer": ((33, 257),), "one": ((1, 257),) * 5, "equal": ((257, 257),), "more": ((257, 257),)}

_WINDOWS = ((-1, -1), (300, -1), (394, 0), (127, -1), (128, 128), (-1, 127), (63, 0), (300, 64))
"""Whose left bound is one key before a tile's, on it, and anywhere else: 300 of 600 keys, 394 of 1,100."""

_CHUNKS = (0, 200, 128)

_GRADIENTS = (
    (),
    ("query", "key", "value"),
    ("query", "key", "value", "mask"),
    ("query", "key", "value", "sinks"),
    ("query", "key", "value", "mask", "sinks"),
)

_USUAL = (
    *("storage", "out", "sink", "mask_shape", "mask_dtype", "closed_rows", "scale", "deterministic"),
    *("batch_invariant", "spec_topk", "kv_parts", "chunked_prefix", "save_kv_cache"),
)
"""Fields whose values a kernel does not treat by tiles: the first one is enough."""

_AXES = ("window", "span", "grad", "mask", "sinks", "softcap", "causal", "chunk", "group", "lse", "logits")
"""What is chosen first, in this order; the other fields follow."""

_WIDTHS = 4
"""Head dims that are tried with long lengths."""

_COST = {"once": 3_000_000, "pairs": 8_000_000}
"""Most scores of one case, for the sake of laptops, of heads 64 wide; gradients count three times. 1,100 x 1,100 of two
heads are 2.4 million."""


class LongCases(RowCases):
    """The cases of one row over several tiles. `span`: a relation of S_q to S_k and the number of its lengths."""

    def _axes(self) -> dict[str, tuple[Hashable, ...]]:
        self.lengths, self.most = self.family.long, _COST["once"]
        axes = super()._axes()
        spans = [[(how, n) for n in range(len(self.lengths.get(str(how), ())))] for how in axes.pop("s_relation")]
        axes["span"] = tuple(span for same in itertools.zip_longest(*spans) for span in same if span is not None)
        axes["logits"] = ("late", "usual")
        axes.pop("shape")
        for name in _USUAL:
            axes[name] = axes[name][:1]
        axes["batch"] = (1,)
        for name, values in (("window", _WINDOWS), ("chunk", _CHUNKS)):
            axes[name] = taken(name, self.row, values) or axes[name]
        axes["grad"] = tuple(grad for grad in axes["grad"] if grad in _GRADIENTS) or axes["grad"]
        axes["mask"] = tuple(mask for mask in axes["mask"] if mask != "tree")
        axes["softcap"] = axes["softcap"][:2]
        for name in ("head_dim", "v_head_dim", "dims"):
            if name in axes:
                axes[name] = tuple(filter(_wide_enough, axes[name]))[:_WIDTHS] or axes[name]
        return axes

    def cases(self, count: int) -> list[Case]:
        """At most `count`: each value of each field once, then those that cover pairs of values."""
        found = {case.id: case for values in self._once() if (case := self._case(values)) is not None}
        if len(found) < count:
            self.most = _COST["pairs"]
            for values in covering(self.axes, self._repair, count, f"{self.seed} long"):
                if (case := self._case(values)) is not None:
                    found.setdefault(case.id, case)
        return list(found.values())[:count]

    def _once(self) -> Iterator[dict[str, Hashable]]:
        """Return cases with each value of each field at least once. What has been met meets others: any of its values
        fills up a case."""
        rng = random.Random(f"{self.seed} once")
        names = [*(name for name in _AXES if name in self.axes), *sorted(self.axes.keys() - {*_AXES})]
        most = max(len(values) for values in self.axes.values())
        turns = [(name, self.axes[name][n]) for n in range(most) for name in names if n < len(self.axes[name])]
        missing = dict.fromkeys(turns)
        # First of all what has no option but its length: a fault there is no option's.
        given: dict[str, Hashable] = dict(self.base)
        name, value = turns[0]
        while missing:
            for others in (given, {}):
                values = self._repair({**self.base, **others, name: value})
                if values is not None and (name, value) in (met := self._met(values)):
                    yield values
                    missing = dict.fromkeys(one for one in missing if one not in met)
                    break
            missing.pop((name, value), None)
            if missing:
                name, value = next(iter(missing))
                # A draw for each field that has several values, and for no other: `covering` says why.
                given = {n: next((v for m, v in missing if m == n), self._drawn(rng, n)) for n in names}
                if name == "chunk":
                    given["window"] = (-1, -1)
                if name == "window":
                    given["span"] = self._tiles_of_queries({**given, name: value}, given["span"])

    def _drawn(self, rng: random.Random, name: str) -> Hashable:
        values = self.axes[name]
        return rng.choice(values) if len(values) > 1 else values[0]

    def _met(self, values: dict[str, Hashable]) -> set[tuple[str, Hashable]]:
        grad: Any = values["grad"]
        return {*({**values, "grad": tuple(name for name in grad if name != "lse")}.items())}

    def _repair(self, values: dict[str, Hashable]) -> dict[str, Hashable] | None:
        v: dict[str, Any] = dict(values)
        if v["window"] != (-1, -1):
            v["chunk"] = 0
        # Lengths beyond what the options reach: a window of 300 keys is none of 257.
        own = v["span"][0]
        spans = sorted(self.axes["span"], key=lambda span: (span != v["span"], span[0] != own))  # type: ignore[index]
        for span in spans:
            v["span"] = span
            v["s_relation"], v["shape"] = span  # type: ignore[misc]
            if self._fits(v):
                return super()._repair(v)
        return None

    def _tiles_of_queries(self, v: dict[str, Any], otherwise: Hashable) -> Hashable:
        """The cheapest span that a window fits in, of those that have more than one tile of queries."""
        found: list[tuple[int, Hashable]] = []
        spans: Any = self.axes["span"]
        for how, n in spans:
            lengths = self.lengths[how][n]
            if max(s_q for s_q, _ in lengths) > 128 and self._fits({**v, "s_relation": how, "shape": n}):
                found.append((sum(s_q * s_k for s_q, s_k in lengths), (how, n)))
        return min(found, key=lambda one: one[0], default=(0, otherwise))[1]

    def _fits(self, v: dict[str, Any]) -> bool:
        lengths = self.lengths[v["s_relation"]][v["shape"]]
        heads = v["group"] * self.family.kv_heads(v["group"])
        width = v.get("dims", (v.get("head_dim"), 0))[0]
        cost = sum(s_q * s_k for s_q, s_k in lengths) * heads * max(width / 64, 1) * (3 if v["grad"] else 1)
        left, right = v["window"]
        reach = max(left, right if v["causal"] == "none" else -1, v["chunk"])
        return bool(cost <= self.most and reach + 64 <= max(s_k for _, s_k in lengths))


def _wide_enough(width: Any) -> bool:
    """Return whether the case is so wide that errors are no matter of luck; 0 is as wide as the keys."""
    return all(n == 0 or n >= 16 for n in (width if isinstance(width, tuple) else (width,)))


def brief(maker: RowCases) -> list[Case]:
    """Return one case of 257 keys, for interpreters and emulators: the last tile of a few keys, whatever its width."""
    wish = {"causal": "bottom_right", "lse": True, "head_dim": 64, "page_size": 16}
    for how, lengths in _BRIEF.items():
        if found := maker.variants({"s_relation": how}, {}, wish=wish, lengths=lengths, logits="late"):
            return found
    return []


def wide(maker: RowCases) -> Iterator[Case]:
    """More sequences x heads than `GRID`, and each of them tiny."""
    for grad in ((), ("query", "key", "value")):
        # What computes packed sequences one by one has few of them to train, and many heads.
        counts = (GRID + 2,) if maker.family.batched else (9,) if grad else (GRID // 64 + 2, GRID // 8 + 2)
        yield from next(filter(None, (_wide(maker, count, grad) for count in counts)), [])


def _wide(maker: RowCases, count: int, grad: tuple[str, ...]) -> list[Case]:
    heads = -(-(GRID + 1) // count)
    # The heads of a latent row are all of one group.
    latent = maker.family.kv_heads(8) == maker.family.kv_heads(1) == 1
    extra = {"group": heads} if latent else {"group": 1, "kv_heads": heads}
    small = {name: _smallest(maker.axes.get(name, ())) for name in ("head_dim", "v_head_dim")}
    small["page_size"] = min(maker.axes["page_size"], default=0)  # type: ignore[type-var]
    for how, lengths in (("equal", (2, 2)), ("one", (1, 2)), ("fewer", (2, 3))):
        asked = {"s_relation": how, "grad": grad}
        if found := maker.variants(asked, extra, wish=small, lengths=(lengths,) * count):
            return found
    return []


def _smallest(widths: Iterable[Any]) -> Any:
    """The least that is no matter of luck; of widths of values 0 is the keys'."""
    return min((width for width in widths if width == 0 or width >= 8), default=0)


_FAR_KEYS = (128, 192, 256, 320)
_FAR: tuple[tuple[str, str, int], ...] = (
    *(("low", mask, keys) for keys in _FAR_KEYS for mask in ("none", "bool", "additive")),
    *(("high", mask, keys) for mask, keys in zip(("bool", "additive", "none", "none"), _FAR_KEYS, strict=True)),
)
_FEW_FAR = (
    *(("low", "none", keys) for keys in _FAR_KEYS[:3]),
    *(("low", "bool", 192), ("low", "additive", 320), ("high", "none", 320)),
)


def far(maker: RowCases, *, few: bool) -> Iterator[Case]:
    """LSEs of about -99 and +99, beyond what exp() of float32 takes: where keys fill a tile, and half of it."""
    trained = ("query", "key", "value")
    wish = {"head_dim": 64, "v_head_dim": 0, "lse": True, "page_size": 16}
    how = next((how for how in ("equal", "fewer", "one") if how in maker.axes["s_relation"]), None)
    if how is None:
        return
    for logits, mask, keys in _FEW_FAR if few else _FAR:
        lengths = _far_lengths(how, keys)
        # A backward has its forward with it; where there is none, and once where there is, the forward alone.
        grads: tuple[tuple[str, ...], ...] = (trained,) if trained in maker.axes["grad"] else ((),)
        for grad in (*grads, ()) if (mask, keys) == ("none", 192) else grads:
            yield from maker.variants(
                {"s_relation": how, "mask": mask, "grad": grad}, {}, wish=wish, lengths=lengths, logits=logits
            )


def one_far(maker: RowCases) -> list[Case]:
    """Return one case of `far` for interpreters, of 100 keys."""
    for how in ("fewer", "one", "equal"):
        wish = {"head_dim": 64, "v_head_dim": 0, "lse": True, "page_size": 16, "grad": ("query", "key", "value")}
        if found := maker.variants({"s_relation": how}, {}, wish=wish, lengths=_far_lengths(how, 100), logits="low"):
            return found
    return []


def _far_lengths(how: str, keys: int) -> Lengths:
    return {"equal": ((keys, keys),), "fewer": ((33, keys),), "one": ((1, keys),) * 5}[how]
