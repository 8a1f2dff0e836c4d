"""Ring attention: each rank keeps its queries, keys and values go round, and the parts are merged by their LSE.

Text is held by all. Its keys join each rank's own block, so that every query sees them once; its queries see on each
rank the keys which that rank has, on the first one those of the text too, and the results of the ranks are merged.
Gradients of keys and values go straight to their owner, who sums them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ..dispatch.part import Part
from ..registry.device_ops import device_ops
from ..semantics.autograd import attention_backward
from ..semantics.merge_lse import merge, merge_shares
from .agreement import compared
from .blocks import OTHERS, Memory, blocks, room, transfer
from .exchange import first_only, wide
from .plan import Plan, Span, Split, visible
from .ranks import Ranks

__all__ = ["Ring", "gradients", "merge_over", "ring_attention"]


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """A call on the ranks of a ring. full, causal: the bound parts. front: the text comes first. gathered: keys and
    values do not go round: each rank gets those of all others at once, and computes one call over them. memory: ranks
    copy the blocks of others out of it; None = blocks are sent."""

    plan: Plan
    ranks: Ranks
    full: Part
    causal: Part
    masked: bool
    front: bool
    gathered: bool
    memory: Memory | None = None

    def visible(self, queries: int, keys: int) -> list[Split]:
        """What the queries of a rank see of the block of another, or of `OTHERS`."""
        spans = [span for span, _, _ in self.others] if keys == OTHERS else self.plan.computed[keys]
        return visible(self.plan.computed[queries], spans, causal=self.masked)

    @functools.cached_property
    def others(self) -> list[tuple[Span, int, Span]]:
        """(positions, rank, rows of its block) of all keys that other ranks have, in the order of positions."""
        found = []
        for rank, spans in enumerate(self.plan.computed):
            row = 0
            for start, stop in spans if rank != self.ranks.index else ():
                found.append(((start, stop), rank, (row, row + stop - start)))
                row += stop - start
        return sorted(found)

    def sorted_others(self, blocks: Mapping[int, Tensor]) -> Tensor:
        """The blocks [B, S, ...] of all other ranks as one, in the order of positions."""
        return _cat([blocks[rank][:, start:stop] for _, rank, (start, stop) in self.others])

    def reach(self, queries: int, keys: int) -> int:
        """How many keys of a rank's block the queries of another see, its first ones."""
        return max((one.keys for one in self.visible(queries, keys)), default=0)

    def part(self, *, causal: bool) -> Part:
        """The part that computes a call."""
        return self.causal if causal else self.full

    def own(self) -> list[_Own]:
        """The calls of a rank on what it holds itself, each by the tokens of its two sides: "own" and "text"."""
        if not self.plan.text:
            return [_Own(("own",), ("own",), self.masked)]
        both = ("text", "own") if self.front else ("own", "text")
        if self.ranks.index == 0:
            return [_Own(both, both, self.masked)]
        after = self.masked and not self.front
        calls = [_Own(("own",), ("own",) if after else both, self.masked)]
        if not (self.masked and self.front):
            calls.append(_Own(("text",), ("own",), False))
        return calls


class _Own(NamedTuple):
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    causal: bool


def ring_attention(ring: Ring, tensors: dict[str, tuple[Tensor, Tensor, Tensor]], segments: Any = None) -> Any:
    """Attention over the keys of all ranks of a ring.

    Args:
        tensors: (q, k, v) [B, S, h, D] of the tokens of this rank, "own", and of the "text" where there is any.
        segments: of each rank int32 [B, S]; None = one segment.

    Returns:
        (out, lse) of each, by name. The gradients of text are those of this rank's share of the work.
    """
    names = list(tensors)
    flat = [tensor for name in names for tensor in tensors[name]]
    found = _Ring.apply(ring, tuple(names), segments, *flat)  # type: ignore[no-untyped-call]
    return {name: found[2 * i : 2 * i + 2] for i, name in enumerate(names)}


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, names: tuple[str, ...], segments: Any, *flat: Tensor) -> tuple[Tensor, ...]:
        flat = tuple(tensor.contiguous() for tensor in flat)
        tensors = _named(names, flat, 3)
        results = forward(ring, tensors, segments)
        found = [one for name in names for one in results[name]]
        ctx.ring, ctx.names, ctx.segments = ring, names, segments
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*flat, *found)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        first_only(grads)
        names = ctx.names
        saved = ctx.saved_tensors
        tensors, results = _named(names, saved[: 3 * len(names)], 3), _named(names, saved[3 * len(names) :], 2)
        found = gradients(ctx.ring, tensors, results, _named(names, grads, 2), ctx.segments)
        return (None, None, None, *(one for name in names for one in found[name]))


def _named(names: tuple[str, ...], flat: Any, count: int) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(flat[i * count : (i + 1) * count]) for i, name in enumerate(names)}


class _Sum:
    """Partial results of the same queries, merged as they come, a few at once; in float32 until all are there."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._query, self._shape = query, (*query.shape[:-1], value.shape[-1])
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._summed = False

    def add(self, rows: tuple[int, int], out: Tensor, lse: Tensor) -> None:
        """The result of some rows, of keys that no other part has."""
        whole = rows == (0, self._shape[1])
        if not (whole and len(self._parts) < _AT_ONCE) and not self._summed:
            self._parts = [self._merged(wide(self._query))]
            self._summed = True
        if whole:
            self._parts.append((out, lse))
            self._summed = False
        else:
            sums = [one[:, rows[0] : rows[1]] for one in self._parts[0]]
            _merge_into([(sums[0], sums[1]), (out, lse)], sums[0], sums[1])

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out in a dtype, lse)."""
        if len(self._parts) == 1:
            return self._parts[0][0].to(dtype), self._parts[0][1]
        return self._merged(dtype)

    def _merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All parts as one, in memory of its own."""
        out = self._query.new_empty(self._shape, dtype=dtype)
        lse = out.new_empty(self._shape[:-1], dtype=wide(self._query))
        if self._parts:
            _merge_into(self._parts, out, lse)
            return out, lse
        return out.zero_(), lse.fill_(float("-inf"))


_AT_ONCE = 4
"""Partial results that are merged at once."""


def _merge_into(parts: Sequence[tuple[Tensor, Tensor]], out: Tensor, lse: Tensor) -> None:
    """Merge partial results [B, S, h, D_v] and their LSEs; the first may be where the result goes."""
    outs, lses = zip(*parts, strict=True)
    kernel = getattr(device_ops(out.device.type), "merge_parts", None)
    if kernel is not None and lse.dtype == torch.float32:
        for b in range(out.shape[0]):
            kernel([one[b] for one in outs], [one[b] for one in lses], out=out[b], lse=lse[b])
        return
    shares, total = merge_shares(lses)
    # Products are taken in the dtype of the shares, and rounded once.
    found = outs[0] * shares[0].unsqueeze(-1)
    for one, share in zip(outs[1:-1], shares[1:-1], strict=True):
        found.addcmul_(one, share.unsqueeze(-1))
    if len(outs) > 1:
        torch.addcmul(found, outs[-1], shares[-1].unsqueeze(-1), out=out)
    else:
        out.copy_(found)
    lse.copy_(total)


def _cut(tensor: Tensor, names: tuple[str, ...], sizes: dict[str, int]) -> dict[str, Tensor]:
    return dict(zip(names, torch.split(tensor, [sizes[name] for name in names], 1), strict=True))


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _segments(ring: Ring, segments: Any, block: int, rows: tuple[int, int], keys: int) -> Any:
    if segments is None:
        return None
    theirs = ring.sorted_others(dict(enumerate(segments))) if block == OTHERS else segments[block]
    return segments[ring.ranks.index][:, rows[0] : rows[1]].contiguous(), theirs[:, :keys].contiguous()


def forward(ring: Ring, tensors: Any, segments: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """(out, lse) of "own" and "text", without gradients."""
    sums = {name: _Sum(query, value) for name, (query, _, value) in tensors.items()}
    query, key, value = tensors["own"]
    me = ring.ranks.index
    for block, k, v in blocks(ring, key, value):
        if not query.shape[2]:
            continue
        if block == me:
            _own_forward(ring, tensors, segments, sums)
            continue
        for rows, keys, causal in ring.visible(me, block):
            given = {"segments": _segments(ring, segments, block, rows, keys)}
            out, lse = ring.part(causal=causal).forward(query[:, rows[0] : rows[1]], k[:, :keys], v[:, :keys], **given)
            sums["own"].add(rows, out, lse)
    found = {name: one.result(wide(query) if name == "text" else query.dtype) for name, one in sums.items()}
    if "text" in found:
        out, lse = merge_over(ring.ranks, *found["text"])
        found["text"] = out.to(query.dtype), lse
    return found


def _own_forward(ring: Ring, tensors: Any, segments: Any, sums: dict[str, _Sum]) -> None:
    sizes = {name: query.shape[1] for name, (query, _, _) in tensors.items()}
    for queries, keys, causal in ring.own():
        q = _cat([tensors[name][0] for name in queries])
        k, v = (_cat([tensors[name][i] for name in keys]) for i in (1, 2))
        if not (q.shape[1] and k.shape[1]):
            continue
        given = {"segments": _segments(ring, segments, ring.ranks.index, (0, q.shape[1]), k.shape[1])}
        out, lse = ring.part(causal=causal).forward(q, k, v, **given)
        for name, part, weight in zip(
            queries, _cut(out, queries, sizes).values(), _cut(lse, queries, sizes).values(), strict=True
        ):
            sums[name].add((0, sizes[name]), part, weight)


def merge_over(ranks: Ranks, out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge, on all ranks, what each has for the same queries; no gradient.

    Args:
        out: [..., H, D_v]. lse: [..., H]; results travel in its dtype. sinks: [H], which come in once.
    """
    packed = torch.cat([out, lse.unsqueeze(-1)], -1)
    parts = packed.unsqueeze(0)
    if ranks.size > 1:
        parts = packed.new_empty(ranks.size, *packed.shape)
        # torch renamed it in 2.13, and warns of the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(parts.flatten(0, 1), packed, group=ranks.group)
    kernel = getattr(device_ops(out.device.type), "merge", None)
    if kernel is None or lse.dtype != torch.float32:
        merged, total = merge(parts[..., :-1].unbind(), parts[..., -1].unbind(), sinks=sinks)
        return merged.to(out.dtype), total
    rows = parts.flatten(1, -3)
    merged, total = out.new_empty(rows.shape[1:-1] + out.shape[-1:]), lse.new_empty(rows.shape[1:-1])
    kernel(rows[..., :-1], rows[..., -1], sinks=sinks, out=merged, lse=total)
    return merged.view(out.shape), total.view(lse.shape)


@compared()
def gradients(ring: Ring, tensors: Any, results: Any, grads: Any, segments: Any) -> dict[str, tuple[Tensor, ...]]:
    """(dq, dk, dv) of "own" and "text", given (out, lse) of the whole and their gradients, either of which may be None.

    Gradients of the text are those of this rank's share of the work: their sum over the ring is the whole.
    """
    names = list(tensors)
    # Rows of all tokens side by side, so that what is true of one call's gradient is done once for all of them.
    sizes = {name: tensors[name][0].shape[1] for name in names}
    q, k, v = (_cat([tensors[name][i] for name in names]) for i in range(3))
    out, lse = (_cat([results[name][i] for name in names]) for i in range(2))
    dout, dlse = (
        None
        if all(grads[name][i] is None for name in names)
        else _cat([results[n][i].new_zeros(results[n][i].shape) if grads[n][i] is None else grads[n][i] for n in names])
        for i in range(2)
    )

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        cut = [_cut(tensor, tuple(names), sizes) for tensor in (q, k, v, out, lse, dout)]
        found = _backward(ring, {name: tuple(one[name] for one in cut) for name in names}, segments)
        dq, dk, dv = (_cat([found[name][i] for name in names]) for i in range(3))
        return dq, dk, dv

    dq, dk, dv, _ = attention_backward(backward, dout, dlse, q, k, v, out, lse, None, 2, {})
    cut = [_cut(one, tuple(names), sizes) for one in (dq, dk, dv) if one is not None]
    return {name: tuple(one[name] for one in cut) for name in names}


def _backward(ring: Ring, given: dict[str, tuple[Tensor, ...]], segments: Any) -> dict[str, tuple[Tensor, ...]]:
    ranks, me = ring.ranks, ring.ranks.index
    totals = {name: [torch.zeros_like(t, dtype=wide(t)) for t in one[:3]] for name, one in given.items()}
    query, key, value, out, lse, dout = (t.contiguous() for t in given["own"])
    dquery, dkey, dvalue = totals["own"]
    arriving: list[Any] = []
    for step, (block, k, v) in enumerate(blocks(ring, key, value)):
        if not query.shape[2]:
            continue
        if block == me:
            _own_backward(ring, given, segments, totals)
            continue
        found = _block_backward(ring, (query, out, lse, dout, dquery), block, k, v, segments)
        if block == OTHERS:
            sent = _by_owner(ring, found)
        else:  # what this rank's keys got comes from the rank that is as far ahead as this block's owner is behind
            sent = {-step: found}
        coming = {-to: room(ring.reach((me - to) % ranks.size, me), key, value) for to in sent}
        works = transfer(ranks, sent, coming)
        _arrived(arriving, dkey, dvalue)  # of the last step, whose transfer this step's kernels hid
        arriving = [(works, coming, sent)]
    _arrived(arriving, dkey, dvalue)
    return {name: tuple(t.to(one[0].dtype) for t in totals[name]) for name, one in given.items()}


def _arrived(arriving: list[Any], dkey: Tensor, dvalue: Tensor) -> None:
    for works, coming, _ in arriving:
        for work in works:
            work.wait()
        for dk, dv in coming.values():
            dkey[:, : dk.shape[1]] += dk
            dvalue[:, : dv.shape[1]] += dv


def _by_owner(ring: Ring, found: tuple[Tensor, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """Gradients of the first of all other ranks' keys, by the steps to those that own them."""
    parts: dict[int, list[tuple[Tensor, ...]]] = {step: [] for step in range(1, ring.ranks.size)}
    row = 0
    for (start, stop), rank, _ in ring.others:
        rows = slice(row, row + stop - start)
        parts[(rank - ring.ranks.index) % ring.ranks.size].append(tuple(one[:, rows] for one in found))
        row = rows.stop

    def joined(pairs: list[tuple[Tensor, ...]], i: int) -> Tensor:
        return _cat([pair[i] for pair in pairs]).contiguous()

    return {step: (joined(pairs, 0), joined(pairs, 1)) for step, pairs in parts.items() if pairs}


def _block_backward(
    ring: Ring, own: tuple[Tensor, ...], block: int, k: Tensor, v: Tensor, segments: Any
) -> tuple[Tensor, Tensor]:
    """The gradients of another rank's block, as far as this rank's queries see it; those of queries are added up."""
    query, out, lse, dout, dquery = own
    calls = ring.visible(ring.ranks.index, block)
    reach = ring.reach(ring.ranks.index, block)
    totals = [torch.zeros_like(t[:, :reach], dtype=wide(t)) for t in (k, v)] if len(calls) > 1 else []
    dk, dv = k[:, :0], v[:, :0]
    for (start, stop), keys, causal in calls:
        q, part, weight, d = (t[:, start:stop].contiguous() for t in (query, out, lse, dout))
        given = {"segments": _segments(ring, segments, block, (start, stop), keys)}
        dq, dk, dv = ring.part(causal=causal).backward(d, q, k[:, :keys], v[:, :keys], part, weight, **given)
        dquery[:, start:stop] += dq
        for total, one in zip(totals, (dk, dv), strict=False):
            total[:, :keys] += one
    if totals:
        dk, dv = (total.to(k.dtype) for total in totals)
    return dk.contiguous(), dv.contiguous()


def _own_backward(ring: Ring, given: Any, segments: Any, totals: Any) -> None:
    sizes = {name: one[0].shape[1] for name, one in given.items()}
    for queries, keys, causal in ring.own():
        q, out, lse, dout = (_cat([given[name][i] for name in queries]) for i in (0, 3, 4, 5))
        k, v = (_cat([given[name][i] for name in keys]) for i in (1, 2))
        if not (q.shape[1] and k.shape[1]):
            continue
        more = {"segments": _segments(ring, segments, ring.ranks.index, (0, q.shape[1]), k.shape[1])}
        found = ring.part(causal=causal).backward(
            dout.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), **more
        )
        for i, (grad, names) in enumerate(zip(found, (queries, keys, keys), strict=True)):
            for name, part in _cut(grad, names, sizes).items():
                totals[name][i] += part
