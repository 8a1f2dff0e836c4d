"""What differs between families: the tensors of a call, and which rows of them are queries, keys and values.

A family that is computed has an entry in `FAMILIES`; checks, plain math and reference then work on it unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .cases import Case

if TYPE_CHECKING:
    from .problems import Maker

__all__ = ["DTYPES", "FAMILIES", "Family", "Part"]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""The request's words for the dtypes that the kit makes tensors of."""

Part = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""query [B, H_q, S_q, D], key, value, attn_mask of sequences of equal lengths."""


class Family(Protocol):
    """One family of `polyattn.records.FAMILIES`."""

    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        """(inputs by argument name, `mask` standing for attn_mask; other arguments)."""
        ...

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs that `Case.storage` is about."""
        ...

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        """The call as plain attention problems, differentiable with respect to `tensors`."""
        ...

    def join(self, case: Case, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Their heads-first results as the call returns them."""
        ...

    def out_shape(self, case: Case) -> tuple[int, ...]:
        """Shape of the output."""
        ...


class _Dense:
    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r, B, (s_q, s_k) = case.request, len(case.lengths), case.longest
        tensors: dict[str, Tensor | None] = {
            name: maker.input(name, *shape) for name, shape in self.shapes(case).items()
        }
        tensors["mask"], tensors["sinks"] = maker.mask(B, r.heads, s_q, s_k), maker.sinks(r.heads, s_k)
        return tensors, {}

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        r, B, (s_q, s_k) = case.request, len(case.lengths), case.longest
        return {
            "query": _by_layout(case, B, s_q, r.heads, r.head_dim),
            "key": _by_layout(case, B, s_k, r.kv_heads, r.head_dim),
            "value": _by_layout(case, B, s_k, r.kv_heads, r.dims[1]),
        }

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        q, k, v = tensors["query"], tensors["key"], tensors["value"]
        if case.request.layout == "BSHD":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        yield q, k, v, tensors.get("mask")

    def join(self, case: Case, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        out, lse = outs[0], lses[0]
        return (out.transpose(1, 2), lse.transpose(1, 2)) if case.request.layout == "BSHD" else (out, lse)

    def out_shape(self, case: Case) -> tuple[int, ...]:
        r = case.request
        return _by_layout(case, len(case.lengths), case.longest[0], r.heads, r.dims[1])


def _by_layout(case: Case, B: int, S: int, H: int, D: int) -> tuple[int, ...]:
    return (B, S, H, D) if case.request.layout == "BSHD" else (B, H, S, D)


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    return starts


class _Packed:
    """What the packed families share: queries along T, one part per sequence."""

    def join(self, case: Case, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat([o[0].transpose(0, 1) for o in outs]), torch.cat([x[0].transpose(0, 1) for x in lses])

    def out_shape(self, case: Case) -> tuple[int, ...]:
        return (sum(q for q, _ in case.lengths), case.request.heads, case.request.dims[1])

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        return {"query": (sum(q for q, _ in case.lengths), case.request.heads, case.request.head_dim)}

    def _queries(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r, (most_q, most_k) = case.request, case.longest
        starts = _starts([q for q, _ in case.lengths])
        tensors: dict[str, Tensor | None] = {
            "query": maker.input("query", *self.shapes(case)["query"]),
            "mask": maker.mask(len(case.lengths), r.heads, most_q, most_k),
            "sinks": maker.sinks(r.heads, most_k),
        }
        lens = {"cu_seqlens_q": maker.integers(*starts), "max_seqlen_q": most_q, "max_seqlen_k": most_k}
        return tensors, lens

    def _split(self, case: Case, tensors: Mapping[str, Tensor], n: int) -> tuple[Tensor, Tensor | None]:
        """query [1, H_q, S_q, D] and mask of sequence n."""
        starts, (s_q, s_k) = _starts([q for q, _ in case.lengths]), case.lengths[n]
        mask = tensors.get("mask")
        if mask is not None:
            mask = mask[n : n + 1] if mask.shape[0] > 1 else mask
            mask = mask[:, :, :s_q, :s_k]
        return _heads_first(tensors["query"][starts[n] : starts[n] + s_q]), mask


def _heads_first(packed: Tensor) -> Tensor:
    return packed.transpose(0, 1).unsqueeze(0)


class _Varlen(_Packed):
    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        tensors, lens = self._queries(case, maker)
        starts = _starts([k for _, k in case.lengths])
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

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        starts = _starts([k for _, k in case.lengths])
        for n, (_, s_k) in enumerate(case.lengths):
            query, mask = self._split(case, tensors, n)
            keys = slice(starts[n], starts[n] + s_k)
            yield query, _heads_first(tensors["key"][keys]), _heads_first(tensors["value"][keys]), mask


class _Paged(_Packed):
    """Keys and values in pages in random order; places that no sequence owns hold NaN."""

    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r = case.request
        tensors, lens = self._queries(case, maker)
        slots, table, pages = _pages(case, maker)
        lens["page_table"], lens["seq_lens"] = table, maker.integers(*(k for _, k in case.lengths))
        for name, width, scale in (("key", r.head_dim, "k_scale"), ("value", r.dims[1], "v_scale")):
            cache, scales, new = self._cache(case, maker, slots, pages, width)
            tensors[f"{name}_cache"], tensors[scale], tensors[name] = cache, scales, new
        return tensors, lens

    def _cache(
        self, case: Case, maker: Maker, slots: list[list[tuple[int, int]]], pages: int, width: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(cache, its scales, new rows or None): the new rows are not in the cache when they are given."""
        r, size = case.request, case.request.page_size
        kind = maker.dtype if r.kv_dtype == "auto" else DTYPES[r.kv_dtype]
        scales = {
            "": None,
            "tensor": torch.tensor(0.5),
            "head": 2.0 ** -(1 + torch.arange(r.kv_heads) % 3).float(),
            "token": 2.0 ** -(1 + (maker.uniform(pages, size, r.kv_heads) * 3).floor()),
        }[r.kv_scales]
        factor = torch.ones(()) if scales is None else scales
        # Powers of two, so that a new row is exactly what the cache can hold of it.
        rows = maker.normal(pages, size, r.kv_heads, width).to(maker.dtype).float().to(kind).float()
        owned = torch.zeros(pages, size, dtype=torch.bool)
        fresh = []
        for (s_q, _), places in zip(case.lengths, slots, strict=True):
            for i, place in enumerate(places):
                given = case.new_rows and i >= len(places) - s_q
                owned[place] = not given
                if given:
                    scale = factor[place][:, None] if r.kv_scales == "token" else factor.reshape(-1, 1)
                    fresh.append(rows[place] * scale)
            # The row of a padding query is there and is read by nobody.
            fresh += [torch.full((r.kv_heads, width), float("nan"))] * (s_q - len(places))
        cache = rows.masked_fill(~owned[..., None, None], float("nan")).to(kind).to(maker.device)
        new = torch.stack(fresh).to(maker.dtype).to(maker.device) if case.new_rows else None
        if r.kv_layout == "HND":
            cache = cache.transpose(1, 2).contiguous()
            scales = scales.transpose(1, 2).contiguous() if r.kv_scales == "token" and scales is not None else scales
        return cache, None if scales is None else scales.to(maker.device), new

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        r = case.request
        starts = _starts([q for q, _ in case.lengths])
        for n, (s_q, s_k) in enumerate(case.lengths):
            query, mask = self._split(case, tensors, n)
            sides = []
            for name, scale in (("key", "k_scale"), ("value", "v_scale")):
                cache, factor = tensors[f"{name}_cache"], tensors.get(scale)
                if r.kv_layout == "HND":
                    cache = cache.transpose(1, 2)
                    factor = factor.transpose(1, 2) if factor is not None and factor.dim() == 3 else factor
                rows = _gather(case, cache, extra["page_table"][n], s_k).to(query.dtype)
                if factor is not None and factor.dim() == 3:
                    per_row = _gather(case, factor, extra["page_table"][n], s_k)
                    rows = rows * per_row.to(query.dtype).unsqueeze(-1)
                elif factor is not None:
                    rows = rows * factor.to(query.dtype).reshape(-1, 1)
                if case.new_rows and s_k:
                    rows = torch.cat([rows[: s_k - s_q], tensors[name][starts[n] : starts[n] + s_q]])
                sides.append(_heads_first(rows))
            yield query, sides[0], sides[1], mask


class _Latent(_Packed):
    """Absorbed MLA: one row per token for all heads; its first D_v numbers are the value."""

    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r = case.request
        tensors, lens = self._queries(case, maker)
        slots, table, pages = _pages(case, maker)
        lens["page_table"], lens["seq_lens"] = table, maker.integers(*(k for _, k in case.lengths))
        owned = torch.zeros(pages, r.page_size, dtype=torch.bool)
        for place in (p for places in slots for p in places):
            owned[place] = True
        rows = maker.normal(pages, r.page_size, r.head_dim).masked_fill(~owned[..., None], float("nan"))
        tensors["cache"] = rows.to(maker.dtype).to(maker.device)
        return tensors, lens

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        for n, (_, s_k) in enumerate(case.lengths):
            query, mask = self._split(case, tensors, n)
            rows = _gather(case, tensors["cache"], extra["page_table"][n], s_k)[None, None]
            yield query, rows, rows[..., : case.request.dims[1]], mask


def _pages(case: Case, maker: Maker) -> tuple[list[list[tuple[int, int]]], Tensor, int]:
    """((page, place) of each token of each sequence, page_table, number of pages). Two pages belong to nobody."""
    size = case.request.page_size
    counts = [-(-k // size) for _, k in case.lengths]
    order = maker.permutation(sum(counts) + 2)
    slots, table = [], []
    for count, (_, length) in zip(counts, case.lengths, strict=True):
        pages, order = order[:count], order[count:]
        slots.append([(pages[t // size], t % size) for t in range(length)])
        table.append([*pages, *[0] * (max(counts) - count)])
    return slots, maker.integers(*table), sum(counts) + 2


def _gather(case: Case, cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The rows of one sequence in order."""
    token = torch.arange(length, device=cache.device)
    return cache[pages[token // case.request.page_size].long(), token % case.request.page_size]


FAMILIES: Mapping[str, Family] = {"dense": _Dense(), "varlen": _Varlen(), "paged": _Paged(), "mla": _Latent()}
