"""Family `dense`: batches of one length."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ... import attention
from ...contract import relation
from ..cases import Case
from .base import Call, Family, Lengths, Part, Shapes, Variants, along, drawn_parts, spans
from .public import COMMON, keywords, off_boundary_too

if TYPE_CHECKING:
    from ..problems import Maker

__all__ = ["Dense"]


class Dense(Family):
    family = "dense"
    lengths: ClassVar[Shapes] = {
        "equal": (((63, 63),), ((100, 100),), ((1, 1),)),
        "one": (((1, 100),), ((1, 63),), ((1, 2),)),
        "fewer": (((63, 100),), ((7, 64),), ((2, 65),)),
        "more": (((100, 63),), ((37, 5),), ((64, 1),)),
    }
    long: ClassVar[Shapes] = {
        "equal": (
            *(((257, 257),), ((600, 600),), ((129, 129),)),
            *(((513, 513),), ((128, 128),), ((1100, 1100),)),
        ),
        "one": (((1, 1100),), ((1, 257),), ((1, 513),)),
        "fewer": (((33, 1100),), ((129, 513),), ((257, 1100),), ((128, 129),)),
        "more": (((257, 129),), ((1100, 257),), ((513, 128),)),
    }
    empty: ClassVar[Mapping[str, Lengths]] = {"equal": (), "fewer": ((0, 7),), "more": ((5, 0),)}
    optional = ("attn_mask", "sinks")
    batched = True
    unmade: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        name: values for name, values in Family.unmade.items() if name not in ("alibi", "segments")
    }
    says = COMMON | {"alibi", "segments", "dropout", "grad", "misaligned", "transform", "graph_capture", "place"}

    def relations(self, variants: Variants, rng: random.Random) -> Iterator[Case]:
        both = itertools.zip_longest(self._splits(variants, rng), self._decodes(variants))
        return (case for pair in both for case in pair if case is not None)

    def _decodes(self, variants: Variants) -> Iterator[Case]:
        for group, window in itertools.product((4, 1), ((17, -1), (-1, -1))):
            asked = {"group": group, "window": window, "s_relation": "equal", "shape": 0}
            wish = {"causal": "bottom_right"}
            if variants({**asked, "s_relation": "one"}, {}, wish=wish):
                yield from variants(asked, {}, wish=wish, check="decode")

    def _splits(self, variants: Variants, rng: random.Random) -> Iterator[Case]:
        kinds = itertools.product((("query", "key", "value"), ()), ("none", "bool"), (4, 1), ("usual", "dominant"))
        for number, (grad, mask, group, sink) in enumerate(kinds):
            asked = {"group": group, "grad": grad, "mask": mask, "closed_rows": mask == "bool", "lse": True}
            asked["causal"] = "none"
            wish = {"v_head_dim": 24}
            # Cut anywhere; for a row that takes no more queries than keys, or not even as many, between wider parts.
            for s_q, s_k, step in ((63, 100, 1), (7, 98, 7), (7, 98, 14)):
                nothing = variants({**asked, "s_relation": "more"}, {"zero_size": True}, wish=wish)
                empty = number % 2 == 0 and bool(nothing)
                parts = drawn_parts(rng, s_k, step, empty)
                needed = {relation(s_q, width) for width in parts if width}
                if all(variants({**asked, "s_relation": how}, {}, wish=wish) for how in needed):
                    whole: dict[str, Any] = {"lengths": ((s_q, s_k),) * 2, "check": "split", "sink": sink}
                    yield from variants({**asked, "s_relation": "fewer"}, {}, wish=wish, **whole, parts=parts)
                    break

    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r, B, (s_q, s_k) = case.request, len(case.lengths), case.longest
        tensors: dict[str, Tensor | None] = {
            name: maker.input(name, *shape) for name, shape in self.shapes(case).items()
        }
        tensors["mask"], tensors["sinks"] = maker.mask(B, r.heads, s_q, s_k), maker.sinks(r.heads, s_k)
        tensors["alibi"] = maker.alibi(r.heads)
        if r.segments:
            tensors["q_segments"] = tensors["k_segments"] = maker.segments(B, s_q)
        if r.segments == "pair":
            tensors["k_segments"] = maker.segments(B, s_k)
        return tensors, {}

    def repaired(self, values: Mapping[str, Any]) -> dict[str, Any]:
        # One tensor of segments speaks of as many queries as keys.
        pair = values["segments"] and values["s_relation"] != "equal"
        return {**values, "segments": "pair" if pair else values["segments"]}

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        r, B, (s_q, s_k) = case.request, len(case.lengths), case.longest
        return {
            "query": _by_layout(case, B, s_q, r.heads, r.head_dim),
            "key": _by_layout(case, B, s_k, r.kv_heads, r.head_dim),
            "value": _by_layout(case, B, s_k, r.kv_heads, r.dims[1]),
        }

    def places(self, case: Case) -> Tensor:
        return along(case.longest[1]).reshape(_by_layout(case, 1, case.longest[1], 1, 1))

    def out_shape(self, case: Case) -> tuple[int, ...]:
        r = case.request
        return _by_layout(case, len(case.lengths), case.longest[0], r.heads, r.dims[1])

    def public(self, call: Call) -> tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]:
        r, t = call.case.request, call.tensors
        options = {"layout": r.layout, "dropout_p": r.dropout, "softcap": r.softcap, "sinks": t.get("sinks")}
        pair = (t.get("q_segments"), t.get("k_segments"))
        options |= {"alibi": t.get("alibi"), "segments": pair if r.segments == "pair" else pair[0]}
        return attention, (t["query"], t["key"], t["value"]), {**keywords(call), **options}

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        q, k, v = tensors["query"], tensors["key"], tensors["value"]
        if case.request.layout == "BSHD":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        yield q, k, v, self.spelt_out(case.request, tensors, tensors.get("mask"), q.shape[2], k.shape[2])

    def join(self, case: Case, outs: Sequence[Tensor], seconds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        out, lse = outs[0], seconds[0]
        return (out.transpose(1, 2), lse.transpose(1, 2)) if case.request.layout == "BSHD" else (out, lse)

    def first(self, call: Call) -> tuple[Call, int]:
        case = dataclasses.replace(call.case, lengths=call.case.lengths[:1])
        return call._replace(case=case, tensors={n: t if t.ndim == 1 else t[:1] for n, t in call.tensors.items()}), 1

    def last(self, call: Call) -> tuple[Call, Tensor, int]:
        case = call.case
        axis, (s_q, s_k) = _axis(case), case.longest
        query = call.tensors["query"]
        index = torch.tensor([s_q - 1], device=query.device)
        segments: Any = "pair" if case.request.segments else ""
        request = dataclasses.replace(case.request, s_relation="one", segments=segments)
        decoding = dataclasses.replace(case, request=request, lengths=((1, s_k),) * len(case.lengths))
        tensors = {**call.tensors, "query": query.index_select(axis, index)}
        if segments:
            tensors["q_segments"] = tensors["q_segments"].index_select(1, index)
        return call._replace(case=decoding, tensors=tensors), index, axis

    def pieces(self, call: Call) -> list[Call]:
        return [self._piece(call, span) for span in spans(call.case.parts)]

    def _piece(self, call: Call, span: slice) -> Call:
        case, t = call.case, call.tensors
        s_q, s_k = case.longest[0], span.stop - span.start
        index = (slice(None),) * _axis(case) + (span,)
        given = {"query": t["query"], "key": t["key"][index], "value": t["value"][index]}
        if "mask" in t:
            given["mask"] = t["mask"][..., span]
        how: Any = relation(s_q, s_k)
        request = dataclasses.replace(case.request, s_relation=how, zero_size=not s_k)
        part = dataclasses.replace(case, request=request, lengths=((s_q, s_k),) * len(case.lengths), parts=())
        return Call(off_boundary_too(part, given), given, {})


def _axis(case: Case) -> int:
    return 1 if case.request.layout == "BSHD" else 2


def _by_layout(case: Case, B: int, S: int, H: int, D: int) -> tuple[int, ...]:
    return (B, S, H, D) if case.request.layout == "BSHD" else (B, H, S, D)
