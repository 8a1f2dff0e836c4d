"""This module has what the packed families share, queries along T; and family `varlen`."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ... import varlen_attention
from ..cases import Case
from .base import Call, Family, Lengths, Part, Shapes, Variants, along, drawn_parts, spans
from .public import COMMON, keywords, off_boundary_too

if TYPE_CHECKING:
    from ..problems import Maker

__all__ = ["Packed", "Varlen", "heads_first", "starts_of"]


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Cumulative lengths from 0: [N+1]."""
    return [0, *itertools.accumulate(lengths)]


def heads_first(packed: Tensor) -> Tensor:
    """[S, H, D] as [1, H, S, D]."""
    return packed.transpose(0, 1).unsqueeze(0)


class Packed(Family):
    """Holds one part per sequence."""

    def join(self, case: Case, outs: Sequence[Tensor], seconds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat([o[0].transpose(0, 1) for o in outs]), torch.cat([x[0].transpose(0, 1) for x in seconds])

    def out_shape(self, case: Case) -> tuple[int, ...]:
        return (sum(q for q, _ in case.lengths), case.request.heads, case.request.dims[1])

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        return {"query": (sum(q for q, _ in case.lengths), case.request.heads, case.request.head_dim)}

    def queries(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        """(query, mask and sinks; what a call says of the queries' lengths)."""
        r, (most_q, most_k) = case.request, case.longest
        starts = starts_of([q for q, _ in case.lengths])
        tensors: dict[str, Tensor | None] = {
            "query": maker.input("query", *self.shapes(case)["query"]),
            "mask": maker.mask(len(case.lengths), r.heads, most_q, most_k),
            "sinks": maker.sinks(r.heads, most_k),
            "alibi": maker.alibi(r.heads),
        }
        lens = {"cu_seqlens_q": maker.integers(*starts), "max_seqlen_q": most_q, "max_seqlen_k": most_k}
        return tensors, lens

    def sequence(self, case: Case, tensors: Mapping[str, Tensor], n: int) -> tuple[Tensor, Tensor | None]:
        """query [1, H_q, S_q, D] and mask of sequence n."""
        starts, (s_q, s_k) = starts_of([q for q, _ in case.lengths]), case.lengths[n]
        mask = tensors.get("mask")
        if mask is not None:
            mask = mask[n : n + 1] if mask.shape[0] > 1 else mask
            mask = mask[:, :, :s_q, :s_k]
        mask = self.spelt_out(case.request, tensors, mask, s_q, s_k)
        return heads_first(tensors["query"][starts[n] : starts[n] + s_q]), mask

    def last(self, call: Call) -> tuple[Call, Tensor, int]:
        case, query = call.case, call.tensors["query"]
        decoding = dataclasses.replace(
            case,
            request=dataclasses.replace(case.request, **self.decoding(case)),
            lengths=tuple((min(q, 1), k) for q, k in case.lengths),
        )
        ends = starts_of([q for q, _ in case.lengths])[1:]
        rows = [end - 1 for end, (q, _) in zip(ends, case.lengths, strict=True) if q]
        index = torch.tensor(rows, device=query.device)
        starts = starts_of([q for q, _ in decoding.lengths])
        cu = torch.tensor(starts, dtype=torch.int32, device=query.device)
        extra = {**call.extra, "cu_seqlens_q": cu, "max_seqlen_q": 1}
        return Call(decoding, {**call.tensors, "query": query.index_select(0, index)}, extra), index, 0

    def decoding(self, case: Case) -> dict[str, Any]:
        """Return what a request of one query asks instead."""
        return {"s_relation": "one"}


class Varlen(Packed):
    family = "varlen"
    lengths: ClassVar[Shapes] = {
        "equal": (((63, 63), (0, 0), (100, 100), (1, 1)), ((17, 17),), ((64, 64), (65, 65), (0, 0))),
        "one": (((1, 63), (1, 1), (1, 100)), ((1, 5),) * 5, ((1, 64), (0, 7), (1, 0), (1, 33), (1, 65))),
        "fewer": (((63, 100), (1, 2), (7, 64)), ((5, 65),), ((0, 3), (16, 17))),
        # Sequences of no queries, of no keys, of neither; `more` stands for any mixture (see dispatch).
        "more": (((63, 100), (0, 5), (5, 0), (100, 37), (1, 1)), ((64, 63),), ((37, 5), (2, 65))),
    }
    long: ClassVar[Shapes] = {
        "equal": (((257, 257), (0, 0), (129, 129)), ((600, 600), (63, 63)), ((513, 513), (128, 128)), ((1100, 1100),)),
        "one": (((1, 1100), (1, 257), (1, 129), (1, 513)), ((1, 1100), (0, 7), (1, 0), (1, 128), (1, 600))),
        "fewer": (((33, 1100), (1, 257), (129, 513)), ((257, 1100), (0, 129)), ((128, 129), (1, 2))),
        "more": (((257, 129), (0, 300), (129, 0), (129, 600)), ((1100, 257), (1, 1)), ((513, 128), (33, 1100))),
    }
    empty: ClassVar[Mapping[str, Lengths]] = {"equal": ((0, 0),), "fewer": ((0, 7),), "more": ((5, 0),)}
    optional = ("attn_mask", "sinks")
    unmade: ClassVar[Mapping[str, tuple[Any, ...]]] = {n: v for n, v in Family.unmade.items() if n != "alibi"}
    says = COMMON | {"alibi", "dropout", "grad", "misaligned", "transform"}

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
        """Sequences that end before a cut have empty parts; one width of 0 is a part without any key."""
        kinds = itertools.product((("query", "key", "value"), ()), ("none", "bool"), (4, 1))
        for number, (grad, mask, group) in enumerate(kinds):
            asked = {"group": group, "grad": grad, "mask": mask, "closed_rows": mask == "bool", "lse": True}
            asked |= {"s_relation": "more", "causal": "none"}
            wish = {"v_head_dim": 24}
            empty = number % 2 == 0 and bool(variants(asked, {"zero_size": True}, wish=wish))
            lengths = ((63, 100), (7, 40), (0, 9), (5, 0), (17, 17))
            parts = drawn_parts(rng, 100, empty=empty)
            yield from variants(asked, {}, wish=wish, lengths=lengths, check="split", parts=parts)

    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        tensors, lens = self.queries(case, maker)
        starts = starts_of([k for _, k in case.lengths])
        for name in ("key", "value"):
            tensors[name] = maker.input(name, *self.shapes(case)[name])
        # Self-attention passes one tensor for both sides: that is how a call says the lengths are equal.
        same = case.request.s_relation == "equal"
        lens["cu_seqlens_k"] = lens["cu_seqlens_q"] if same else maker.integers(*starts)
        return tensors, lens

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        r, tokens = case.request, sum(k for _, k in case.lengths)
        return {
            **super().shapes(case),
            "key": (tokens, r.kv_heads, r.head_dim),
            "value": (tokens, r.kv_heads, r.dims[1]),
        }

    def places(self, case: Case) -> Tensor:
        return torch.cat([along(k) for _, k in case.lengths])[:, None, None]

    def sayable(self, case: Case) -> bool:
        return super().sayable(case) and case.request.s_relation != "fewer"

    def public(self, call: Call) -> tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]:
        r, t = call.case.request, call.tensors
        options = {"dropout_p": r.dropout, "softcap": r.softcap, "sinks": t.get("sinks"), "alibi": t.get("alibi")}
        return varlen_attention, (t["query"], t["key"], t["value"]), {**keywords(call), **options}

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        starts = starts_of([k for _, k in case.lengths])
        for n, (_, s_k) in enumerate(case.lengths):
            query, mask = self.sequence(case, tensors, n)
            keys = slice(starts[n], starts[n] + s_k)
            yield query, heads_first(tensors["key"][keys]), heads_first(tensors["value"][keys]), mask

    def first(self, call: Call) -> tuple[Call, int]:
        case, t = call.case, call.tensors
        s_q, s_k = case.lengths[0]
        tensors = {**t, "query": t["query"][:s_q], "key": t["key"][:s_k], "value": t["value"][:s_k]}
        if "mask" in t:
            tensors["mask"] = t["mask"][:1]
        cu_q = call.extra["cu_seqlens_q"][:2]
        same = call.extra["cu_seqlens_k"] is call.extra["cu_seqlens_q"]
        extra = {**call.extra, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_q if same else call.extra["cu_seqlens_k"][:2]}
        return Call(dataclasses.replace(case, lengths=case.lengths[:1]), tensors, extra), s_q

    def pieces(self, call: Call) -> list[Call]:
        return [self._piece(call, span) for span in spans(call.case.parts)]

    def _piece(self, call: Call, span: slice) -> Call:
        case, t = call.case, call.tensors
        device = t["query"].device
        starts = starts_of([k for _, k in case.lengths])
        cut = [(min(span.start, k), min(span.stop, k)) for _, k in case.lengths]
        rows = [torch.arange(at + a, at + b) for at, (a, b) in zip(starts, cut, strict=False)]
        index = torch.cat(rows).to(device)
        widths = [b - a for a, b in cut]
        given = {"query": t["query"], **{name: t[name].index_select(0, index) for name in ("key", "value")}}
        if "mask" in t:
            given["mask"] = t["mask"][..., span]
        lengths = tuple((q, width) for (q, _), width in zip(case.lengths, widths, strict=True))
        request = dataclasses.replace(case.request, zero_size=not sum(widths))
        part = dataclasses.replace(case, request=request, lengths=lengths, parts=())
        cu = torch.tensor(starts_of(widths), dtype=torch.int32, device=device)
        extra = {**call.extra, "cu_seqlens_k": cu, "max_seqlen_k": max(widths)}
        return Call(off_boundary_too(part, given), given, extra)
