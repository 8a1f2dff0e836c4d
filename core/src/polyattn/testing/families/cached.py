"""This module has what the families over a paged cache share: their pages, further keys in parts, and the steps of an
engine."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...contract import KVPart, PagedTables
from ..cases import Case
from .base import Call, Lengths, Part, Shapes, Variants, along, drawn_parts, spans
from .packed import Packed, heads_first, starts_of
from .public import COMMON

if TYPE_CHECKING:
    from ..problems import Maker

__all__ = ["SERVING", "Cached", "Table", "in_tables"]

SERVING = COMMON | {"phase", "kv_dtype", "page_size", "kv_scales", "kv_parts", "tree", "chunked_prefix", "misaligned"}
"""Fields that the public calls over a cache can ask for."""

_STEPS: tuple[dict[str, Any], ...] = (
    {"phase": "decode", "s_relation": "one"},
    {"phase": "extend", "s_relation": "fewer"},
    {"phase": "extend", "s_relation": "fewer", "chunked_prefix": True},
    {"phase": "verify", "s_relation": "fewer", "spec_topk": 1},
    {"phase": "verify", "s_relation": "fewer", "mask": "tree"},
    {"phase": "decode", "s_relation": "one", "kv_parts": 1},
    {"phase": "extend", "s_relation": "more", "kv_parts": 3},
)
"""What an engine's steps ask, as the public calls say it; a chain of drafts is asked for through `bind` alone."""

_DRAFTS: Lengths = ((5, 64), (3, 9), (1, 0), (4, 4))
"""Drafts and keys of a batch that is verified: trees of their own, a padding row, one without a prefix."""

_RECORDED: Lengths = ((4, 64), (4, 0), (4, 9), (4, 0))
"""New tokens and keys of a recorded step: rows of one length, those of padding too."""

_ENCODER: Lengths = ((9, 3), (2, 40), (4, 4), (1, 0))
"""Queries and keys of cross-attention: an encoder may be shorter than what attends to it."""


def in_tables(*, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, **given: Any) -> dict[str, Any]:
    """The keywords of a public call as those of a bound one: what says where the keys are becomes `tables`."""
    longest = given.pop("max_seqlen_q", 0), given.pop("max_seqlen_k", 0)
    return {"tables": PagedTables(page_table, seq_lens, cu_seqlens_q, *longest), **given}


class Table(NamedTuple):
    """Describes where the rows of a call, or of one of its parts, lie: the place of each of their tokens, and their
    pages."""

    lengths: Sequence[int]
    slots: Sequence[Sequence[tuple[int, int]]]
    pages: Tensor


class Cached(Packed):
    """Rows in pages in random order. The queries are the last tokens of their sequences, so there are never more of
    them than keys; a sequence of no tokens is a padding row: it has a query, which sees nothing."""

    lengths: ClassVar[Shapes] = {
        "equal": (((17, 17), (1, 1), (40, 40)), ((5, 5),)),
        "one": (((1, 63), (1, 0), (1, 1), (1, 100)), ((1, 5),) * 5),
        "fewer": (((7, 64), (1, 9), (33, 100)), ((4, 37),)),
        "more": (((7, 64), (5, 5)), ((3, 3), (4, 37))),
    }
    long: ClassVar[Shapes] = {
        "equal": (((257, 257), (129, 129)), ((513, 513), (128, 128)), ((1100, 1100),)),
        "one": (((1, 1100), (1, 0), (1, 257), (1, 129)), ((1, 513), (1, 128), (1, 1), (1, 600))),
        "fewer": (((129, 600), (1, 257), (9, 1100)), ((257, 513), (33, 129)), ((128, 1100), (1, 128))),
        "more": (((64, 600), (5, 257)), ((129, 1100),)),
    }
    empty: ClassVar[Mapping[str, Lengths]] = {"equal": ((0, 0),), "fewer": ((0, 7),), "more": ((5, 0),)}

    caches: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()

    # --- what is generated

    def axes(self, axes: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        # Storage is of the queries; caches are whole. Pages have a size.
        return {
            **axes,
            "storage": tuple(s for s in axes["storage"] if s != "expanded"),
            "page_size": tuple(n for n in axes["page_size"] if n != 0),
        }

    def repaired(self, values: Mapping[str, Any]) -> dict[str, Any]:
        v = dict(values)
        if v["kv_parts"]:
            # Parts have no positions; those of the call's own keys count from the end.
            v |= {"window": (-1, -1), "chunk": 0, "alibi": False, "batch_invariant": False}
            v["causal"] = "none" if v["causal"] == "none" else "bottom_right"
            if v["mask"] == "tree":
                v["kv_parts"] = 0
        if v["mask"] == "tree":
            v["chunked_prefix"] = False
        return v

    def keywords(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        return in_tables(**extra)

    def relations(self, variants: Variants, rng: random.Random) -> Iterator[Case]:
        kinds = (self._steps(variants), self._decodes(variants), self._pages(variants), self._splits(variants, rng))
        return (case for cases in itertools.zip_longest(*kinds) for case in cases if case is not None)

    def _steps(self, variants: Variants) -> Iterator[Case]:
        wish = {"group": 4, "causal": "bottom_right", "page_size": 16}
        for step, saved, layout in itertools.product(_STEPS, (True, None), ("NHD", "HND")):
            asked = {"shape": 0, **self.step(saved, layout), **step}
            yield from variants(asked, {}, wish=wish)
            if step.get("spec_topk") == 1:
                yield from variants({**asked, "lse": True}, {}, wish=wish, lengths=_RECORDED)
                yield from variants(asked, {}, wish=wish, lengths=_RECORDED)
            if step.get("mask") == "tree":
                yield from variants({**asked, "lse": True}, {}, wish=wish, lengths=_DRAFTS)
                yield from variants(asked, {}, wish=wish, lengths=_DRAFTS)
        for layout, lse in itertools.product(("NHD", "HND"), (False, True)):
            asked = {"shape": 0, **self.step(None, layout), "cross": True, "causal": "none", "lse": lse}
            asked |= {"phase": "extend", "s_relation": "more"}
            yield from variants(asked, {}, wish={"group": 4, "page_size": 16}, lengths=_ENCODER)

    def step(self, saved: bool | None, layout: str) -> dict[str, Any]:
        """Field values of one step of an engine. `saved`: as `AttentionRequest.save_kv_cache`."""
        return {}

    def recorded(self, variants: Variants) -> Iterator[Case]:
        wish = {"group": 4, "causal": "bottom_right", "page_size": 16}
        # Of a recorded step only padding has no keys, and what it gives has no meaning.
        chain, tree = _STEPS[3:5]
        decode = {"lengths": ((1, 63), (1, 1), (1, 100))}
        for step, changes in (({**_STEPS[0]}, decode), (tree, {}), (chain, {}), ({**_STEPS[0], "lse": True}, decode)):
            asked = {"shape": 1, **self.step(True, "NHD"), **step}
            yield from variants(asked, {"graph_capture": "session"}, wish=wish, check="capture", **changes)

    def _decodes(self, variants: Variants) -> Iterator[Case]:
        wish = {"causal": "bottom_right", "page_size": 16}
        decode, extend, *_ = _STEPS
        for group, window in itertools.product((4, 1), ((17, -1), (-1, -1))):
            asked = {"group": group, "window": window, "shape": 0, **self.step(None, "NHD")}
            if variants({**asked, **decode}, {}, wish=wish):
                yield from variants({**asked, **extend}, {}, wish=wish, check="decode")

    def _pages(self, variants: Variants) -> Iterator[Case]:
        for step, size, layout in itertools.product(_STEPS[:2], (16, 1, 5, 64), ("NHD", "HND")):
            wish = {"group": 4, "causal": "bottom_right", "page_size": size}
            yield from variants({"shape": 0, **self.step(None, layout), **step}, {}, wish=wish, check="pages")

    def _splits(self, variants: Variants, rng: random.Random) -> Iterator[Case]:
        """Decode over parts of the pages, as in a cascade or in decode context parallelism. Sequences that end before a
        cut are padding rows of the parts behind it."""
        for wished, sink, group in itertools.product((16, 1, 5), ("usual", "dominant"), (4, 1)):
            asked, wish = {"lse": True, "group": group, **self.step(None, "NHD"), **_STEPS[0]}, {"page_size": wished}
            for case in variants(asked, {}, wish=wish):
                size = case.request.page_size
                pages = max(-(-100 // size), 3)
                parts = drawn_parts(rng, pages * size, step=size)
                lengths = ((1, pages * size - size // 2), (1, 63), (1, 0), (1, 5))
                yield from variants(asked, {}, wish=wish, lengths=lengths, check="split", sink=sink, parts=parts)

    # --- tensors

    def queries(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        tensors, lens = super().queries(case, maker)
        if case.request.tree and len(case.lengths) > 1:
            tensors["mask"] = self._trees(case, maker)
        return tensors, lens

    def _trees(self, case: Case, maker: Maker) -> Tensor:
        """A tree for each sequence, [N, 1, S_q, S_k]; what lies outside of its own rows and columns is anything."""
        most_q, most_k = case.longest
        masks = maker.uniform(len(case.lengths), 1, most_q, most_k) < 0.5
        for n, (s_q, s_k) in enumerate(case.lengths):
            tree = maker.mask(1, 1, s_q, s_k) if s_k else None
            if tree is not None:
                masks[n, :, :s_q, :s_k] = tree[0].cpu()
        return masks.to(maker.device)

    def groups(self, case: Case, maker: Maker) -> list[list[tuple[int, int]]]:
        """(queries, keys) of each group of each further part. Groups have one query each unless there may be more
        queries than keys."""
        tokens = sum(q for q, _ in case.lengths)
        return [self._group(tokens, case.request.s_relation == "more", maker) for _ in range(case.request.kv_parts)]

    def _group(self, tokens: int, several: bool, maker: Maker) -> list[tuple[int, int]]:
        sizes: list[int] = []
        while sum(sizes) < tokens:
            drawn = 2 + int(maker.uniform(1) * 5) if several else 1
            sizes.append(min(drawn, tokens - sum(sizes)))
        return [(size, int(maker.uniform(1) * 30)) for size in sizes]

    def tables(self, case: Case, maker: Maker, groups: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[Table], int]:
        """(the table of the call and of each of its parts, number of pages). Two pages belong to nobody."""
        size = case.request.page_size
        rows = [[k for _, k in case.lengths], *([k for _, k in group] for group in groups)]
        counts = [[-(-length // size) for length in lengths] for lengths in rows]
        total = sum(map(sum, counts)) + 2
        order = maker.permutation(total)
        found = []
        for lengths, needed in zip(rows, counts, strict=True):
            slots, table = [], []
            for count, length in zip(needed, lengths, strict=True):
                pages, order = order[:count], order[count:]
                slots.append([(pages[t // size], t % size) for t in range(length)])
                table.append([*pages, *[0] * (max(needed) - count)])
            found.append(Table(lengths, slots, maker.integers(*table).reshape(len(lengths), max(needed, default=0))))
        return found, total

    def places_of(self, case: Case, tables: Sequence[Table], pages: int) -> Tensor:
        """Return where the token in each place of a pool lies in its sequence, from 0 to 1: [pages, page_size]."""
        places = torch.ones(pages, case.request.page_size)
        for slots in (slots for table in tables for slots in table.slots if slots):
            places[tuple(torch.tensor(slots).T)] = along(len(slots))
        return places

    def lens(
        self,
        tables: Sequence[Table],
        groups: Sequence[Sequence[tuple[int, int]]],
        maker: Maker,
        pools: Sequence[Mapping[str, Tensor]],
    ) -> dict[str, Any]:
        """Return what a call says of its keys: its tables and its parts, those with `pools` in pools of their own."""
        own, *others = tables
        lens: dict[str, Any] = {"page_table": own.pages, "seq_lens": maker.integers(*own.lengths)}
        if others:
            lens["kv_parts"] = tuple(
                KVPart(
                    page_table=table.pages,
                    seq_lens=maker.integers(*table.lengths),
                    cu_seqlens_q=maker.integers(*starts_of([q for q, _ in group])),
                    max_seqlen_q=max(q for q, _ in group),
                    max_seqlen_k=max(table.lengths),
                    **pool,
                )
                for table, group, pool in zip(others, groups, pools, strict=True)
            )
        return lens

    # --- what is right

    @abc.abstractmethod
    def sides(
        self, case: Case, tensors: Mapping[str, Tensor], pages: Tensor, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Real keys (and values, where they are other rows) [S, H_kv, D] of `length` tokens on `pages`."""

    def own(self, case: Case, tensors: Mapping[str, Tensor], sides: tuple[Tensor, ...], n: int) -> tuple[Tensor, ...]:
        """The call's own keys and values of sequence n, with those that are not in the cache yet."""
        return sides

    def key_value(self, case: Case, sides: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """key and value [1, H_kv, S_k, D] of these rows."""
        key, value = sides
        return heads_first(key), heads_first(value)

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        starts = starts_of([q for q, _ in case.lengths])
        for n, (s_q, s_k) in enumerate(case.lengths):
            query, mask = self.sequence(case, tensors, n)
            own = self.own(case, tensors, self.sides(case, tensors, extra["page_table"][n], s_k, query.dtype), n)
            more, seen = self._more(case, tensors, extra, starts[n], s_q, query.dtype)
            if more:
                # Before the call's own keys, which keep their positions: those are counted from the end.
                own = tuple(torch.cat(rows) for rows in zip(*more, own, strict=True))
                mask = _with_more(mask, seen, s_k)
            yield query, *self.key_value(case, own), mask

    def _more(
        self,
        case: Case,
        tensors: Mapping[str, Tensor],
        extra: Mapping[str, Any],
        start: int,
        s_q: int,
        dtype: torch.dtype,
    ) -> tuple[list[tuple[Tensor, ...]], Tensor]:
        """(rows of the further keys that queries from `start` on may see, which of these queries see which)."""
        found, seen = [], []
        rows = torch.arange(start, start + s_q)
        for part in extra.get("kv_parts", ()):
            bounds = part.cu_seqlens_q.tolist()
            pool = {**tensors, **{n: t for n in self.caches if (t := getattr(part, n)) is not None}}
            for g, length in enumerate(part.seq_lens.tolist()):
                inside = (rows >= bounds[g]) & (rows < bounds[g + 1])
                if length and bool(inside.any()):
                    found.append(self.sides(case, pool, part.page_table[g], length, dtype))
                    seen.append(inside[:, None].expand(s_q, length))
        device = tensors["query"].device
        return found, torch.cat(seen, 1).to(device) if seen else torch.ones(s_q, 0, dtype=torch.bool, device=device)

    # --- the call

    def sayable(self, case: Case) -> bool:
        r = case.request
        decode = case.longest[0] == 1 and not r.tree and not r.chunked_prefix
        phase = "verify" if r.tree else "decode" if decode else "extend"
        grouped = r.kv_parts and r.s_relation == "more"
        relation = "more" if grouped else "one" if decode else "fewer"
        return super().sayable(case) and r.phase == phase and r.s_relation == relation

    def steps(self, case: Case) -> dict[str, Any]:
        """Keyword arguments of a public call that say what step it is."""
        return {"tree": case.request.tree, "chunked_prefix": case.request.chunked_prefix}

    def decoding(self, case: Case) -> dict[str, Any]:
        return {"s_relation": "one", "phase": "decode"}

    # --- other calls that must give the same numbers

    def first(self, call: Call) -> tuple[Call, int]:
        case, extra = call.case, call.extra
        s_q, _ = case.lengths[0]
        own = {"query": call.tensors["query"][:s_q]}
        own |= {n: call.tensors[n][:s_q] for n in ("key", "value") if n in call.tensors}
        own |= {"mask": call.tensors["mask"][:1]} if "mask" in call.tensors else {}
        alone = {name: extra[name][:1] for name in ("page_table", "seq_lens")}
        alone["cu_seqlens_q"] = extra["cu_seqlens_q"][:2]
        single = dataclasses.replace(case, lengths=case.lengths[:1])
        return Call(single, {**call.tensors, **own}, {**extra, **alone}), s_q

    def pieces(self, call: Call) -> list[Call]:
        return [self._piece(call, span) for span in spans(call.case.parts)]

    def _piece(self, call: Call, span: slice) -> Call:
        case, size = call.case, call.case.request.page_size
        widths = [max(min(span.stop, k) - span.start, 0) for _, k in case.lengths]
        lengths = tuple((q, width) for (q, _), width in zip(case.lengths, widths, strict=True))
        table = call.extra["page_table"]
        extra = {
            **call.extra,
            "page_table": table[:, span.start // size : -(-span.stop // size)].contiguous(),
            "seq_lens": torch.tensor(widths, dtype=torch.int32, device=table.device),
            "max_seqlen_k": max(widths),
        }
        return call._replace(case=dataclasses.replace(case, lengths=lengths, parts=()), extra=extra)

    def repaged(self, call: Call, generator: torch.Generator) -> Call:
        count = call.tensors[self.caches[0]].shape[0]
        # Where each page goes; its content goes with it.
        target = torch.randperm(count, generator=generator).to(call.tensors["query"].device)
        source = target.argsort()
        given = {name: call.tensors[name] for name in (*self.caches, *self.scales) if name in call.tensors}
        moved = {name: t[source] for name, t in given.items() if name in self.caches or t.dim() > 2}
        table = target[call.extra["page_table"].long()].to(torch.int32)
        return call._replace(tensors={**call.tensors, **moved}, extra={**call.extra, "page_table": table})


def _with_more(mask: Tensor | None, seen: Tensor, s_k: int) -> Tensor:
    """The mask over further keys, of which each query sees those in `seen`, and then the call's own."""
    if mask is None:
        return torch.cat([seen, seen.new_ones(seen.shape[0], s_k)], 1)[None, None]
    before = seen
    if mask.dtype != torch.bool:
        before = torch.zeros_like(seen, dtype=mask.dtype).masked_fill(~seen, float("-inf"))
    return torch.cat([before.expand(*mask.shape[:2], *seen.shape), mask], -1)
