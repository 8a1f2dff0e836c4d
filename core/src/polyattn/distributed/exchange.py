"""What ranks exchange outside of a ring: heads for tokens, tokens for a better order, and text, which all hold.

Each is an autograd function whose backward is the exchange the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..errors import UnsupportedRequestError
from .plan import Heads, Plan, Span, splits
from .ranks import MeshRanks, Ranks

__all__ = [
    "all_segments",
    "first_only",
    "heads_of_tokens",
    "join_heads",
    "picked_heads",
    "reordered",
    "scattered",
    "split_heads",
    "text_heads",
    "to_heads",
    "to_tokens",
    "wide",
]


def first_only(grads: Sequence[Tensor | None]) -> None:
    """Refuse gradients of gradients, which what ranks exchange would drop.

    Raises:
        UnsupportedRequestError: autograd records, and a gradient that came is recorded.
    """
    if torch.is_grad_enabled() and any(grad is not None and grad.requires_grad for grad in grads):
        raise UnsupportedRequestError(
            "a second derivative is wanted of a layer over ranks, which exchange numbers and not how they came about. "
            'Compute it where one rank has all tokens, by LocalAttention(backend="reference")'
        )


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype that sums of a tensor are taken in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _swap(
    ranks: Ranks, sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]]
) -> list[tuple[Tensor, list[Tensor]]]:
    """Give each rank its piece of each tensor, and take theirs.

    Args:
        sent: of each tensor a piece for each rank. shapes: of what comes from each.

    Returns:
        Of each tensor all that came, flat, and the pieces of it.
    """
    works, received = [], []
    for pieces, coming in zip(sent, shapes, strict=True):
        counts = [[piece.numel() for piece in pieces], [torch.Size(shape).numel() for shape in coming]]
        buffer = _packed(pieces, counts[0])
        into = buffer.new_empty(sum(counts[1]))
        # The next tensor is packed while this one is on its way.
        works.append(dist.all_to_all_single(into, buffer, counts[1], counts[0], group=ranks.group, async_op=True))
        parts = torch.split(into, counts[1])
        received.append((into, [part.view(shape) for part, shape in zip(parts, coming, strict=True)]))
    for work in works:
        work.wait()
    return received


def _packed(pieces: list[Tensor], counts: list[int]) -> Tensor:
    """The pieces one after the other, in memory of their own unless they lie so already."""
    first = pieces[0]
    at = first.storage_offset()
    ends = [at + sum(counts[: i + 1]) for i in range(len(counts))]
    if all(
        piece.is_contiguous()
        and piece.storage_offset() + count == end
        and piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for piece, count, end in zip(pieces, counts, ends, strict=True)
    ):
        return first.as_strided((sum(counts),), (1,))
    buffer = first.new_empty(sum(counts))
    for part, piece in zip(torch.split(buffer, counts), pieces, strict=True):
        part.view(piece.shape).copy_(piece)
    return buffer


def _queries(heads: Heads) -> tuple[int, ...]:
    return tuple(range(heads.start, heads.stop))


def _picked(tensor: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads, which are on axis 2."""
    first = heads[0] if heads else 0
    if tuple(heads) == tuple(range(first, first + len(heads))):
        return tensor.narrow(2, first, len(heads))
    return tensor[:, :, list(heads)]


class _ToHeads(torch.autograd.Function):
    """[B, S of this rank, H, D] -> [B, S of the group, h of this rank, D]."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, mesh: MeshRanks, picks: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.given = plan, mesh, picks, [t.shape[2] for t in tensors]
        return _scatter_heads(plan, mesh, picks, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_only(grads)
        plan, mesh, picks, heads = ctx.given
        return (None, None, None, *_collect_heads(plan, mesh, picks, heads, grads))


class _ToTokens(torch.autograd.Function):
    """[B, S of the group, h of this rank, D] -> [B, S of this rank, H, D]."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, mesh: MeshRanks, picks: Any, heads: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.given = plan, mesh, picks
        return _collect_heads(plan, mesh, picks, heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_only(grads)
        plan, mesh, picks = ctx.given
        return (None, None, None, None, *_scatter_heads(plan, mesh, picks, grads))


_Picks = Sequence[Sequence[tuple[int, ...]]]
"""Of each tensor the heads that each rank of a group takes."""


def _scatter_heads(plan: Plan, mesh: MeshRanks, picks: _Picks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    lengths, me = plan.group(mesh.ring.index), mesh.ulysses.index
    sent = [[_picked(t, pick) for pick in of] for t, of in zip(tensors, picks, strict=True)]
    shapes = [
        [(t.shape[0], length, len(of[me]), *t.shape[3:]) for length in lengths]
        for t, of in zip(tensors, picks, strict=True)
    ]
    # What came lies in the order of ranks, which for one row of a batch is that of tokens.
    return tuple(
        into.view(1, sum(lengths), *parts[0].shape[2:]) if parts[0].shape[0] == 1 else torch.cat(parts, 1)
        for into, parts in _swap(mesh.ulysses, sent, shapes)
    )


def _collect_heads(
    plan: Plan, mesh: MeshRanks, picks: _Picks, heads: Sequence[int], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    lengths, me = plan.group(mesh.ring.index), mesh.ulysses.index
    sent = [list(torch.split(t, list(lengths), 1)) for t in tensors]
    shapes = [
        [(t.shape[0], lengths[me], len(pick), *t.shape[3:]) for pick in of]
        for t, of in zip(tensors, picks, strict=True)
    ]
    found = _swap(mesh.ulysses, sent, shapes)
    return tuple(_summed(parts, of, count) for (_, parts), of, count in zip(found, picks, heads, strict=True))


def _summed(parts: list[Tensor], picks: Sequence[tuple[int, ...]], heads: int) -> Tensor:
    """Heads of several ranks side by side, those that several have as their sum."""
    order = [head for pick in picks for head in pick]
    if order == list(range(heads)):
        return torch.cat(parts, 2)
    first = parts[0]
    total = torch.zeros(*first.shape[:2], heads, *first.shape[3:], dtype=wide(first), device=first.device)
    for part, pick in zip(parts, picks, strict=True):
        _add_heads(total, pick, part)
    return total.to(first.dtype)


def to_heads(plan: Plan, mesh: MeshRanks, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of the Ulysses group and the heads of this rank: q, k, v [B, S_group, h, D]."""
    if mesh.ulysses.size == 1:
        return query, key, value
    queries, keys = [_queries(one) for one in plan.heads], [one.keys for one in plan.heads]
    q, k, v = _ToHeads.apply(plan, mesh, (queries, keys, keys), query, key, value)  # type: ignore[no-untyped-call]
    return q, k, v


def heads_of_tokens(plan: Plan, mesh: MeshRanks, tensor: Tensor) -> Tensor:
    """A tensor [B, S, H, D] that goes with the queries, such as a gate, with the tokens and heads of `to_heads`."""
    if mesh.ulysses.size == 1:
        return tensor
    picks = ([_queries(one) for one in plan.heads],)
    found: tuple[Tensor] = _ToHeads.apply(plan, mesh, picks, tensor)  # type: ignore[no-untyped-call]
    return found[0]


def to_tokens(plan: Plan, mesh: MeshRanks, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Results [B, S_group, h, ...] as the tokens of this rank and all heads."""
    if mesh.ulysses.size == 1:
        return tensors
    picks = [[_queries(one) for one in plan.heads]] * len(tensors)
    heads = [plan.query_heads] * len(tensors)
    found: tuple[Tensor, ...] = _ToTokens.apply(plan, mesh, picks, heads, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Reordered(torch.autograd.Function):
    """Tokens of a ring, from the ranks that hold them to those that compute them."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, source: Any, target: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.given = ranks, target, source
        return _move(ranks, source, target, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_only(grads)
        ranks, source, target = ctx.given
        return (None, None, None, *_move(ranks, source, target, grads))


_Pieces = Sequence[Sequence[Span]]


def _move(ranks: Ranks, source: _Pieces, target: _Pieces, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    me = ranks.index
    leaving = [splits(source[me], spans) for spans in target]
    coming = [splits(target[me], spans) for spans in source]
    sent = [[_rows(t, spans) for spans in leaving] for t in tensors]
    shapes = [[(t.shape[0], Plan.tokens(spans), *t.shape[2:]) for spans in coming] for t in tensors]
    found = []
    for tensor, (_, parts) in zip(tensors, _swap(ranks, sent, shapes), strict=True):
        into = tensor.new_empty(tensor.shape[0], Plan.tokens(target[me]), *tensor.shape[2:])
        for part, spans in zip(parts, coming, strict=True):
            row = 0
            for start, stop in spans:
                into[:, start:stop] = part[:, row : row + stop - start]
                row += stop - start
        found.append(into)
    return tuple(found)


def _rows(tensor: Tensor, spans: Sequence[Span]) -> Tensor:
    parts = [tensor[:, start:stop] for start, stop in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1) if parts else tensor[:, :0]


def reordered(ranks: Ranks, source: _Pieces, target: _Pieces, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors [B, S, ...] of a ring's ranks, whose rows lie at positions `source`, with rows at positions `target`."""
    if source == target:
        return tensors
    found: tuple[Tensor, ...] = _Reordered.apply(ranks, source, target, *tensors)  # type: ignore[no-untyped-call]
    return found


class _TextHeads(torch.autograd.Function):
    """[B, T, H, D] of all ranks -> [B, T, h, D]. The gradient of each rank is its own, or that of all."""

    @staticmethod
    def forward(ctx: Any, mesh: MeshRanks, pick: tuple[int, ...], whole: bool, text: Tensor) -> Tensor:
        ctx.given = mesh, pick, whole, text.shape[2]
        return _picked(text, pick).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_only((grad,))
        mesh, pick, whole, heads = ctx.given
        total = _placed(grad, pick, heads)
        if whole:
            mesh.ring.all_reduce(mesh.ulysses.all_reduce(total))
        return None, None, None, total.to(grad.dtype)


class _JoinHeads(torch.autograd.Function):
    """[B, T, h, ...] -> [B, T, H, ...] on all ranks of a Ulysses group."""

    @staticmethod
    def forward(ctx: Any, mesh: MeshRanks, pick: tuple[int, ...], heads: int, whole: bool, text: Tensor) -> Tensor:
        ctx.given = mesh, pick, whole
        return mesh.ulysses.all_reduce(_placed(text, pick, heads)).to(text.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_only((grad,))
        mesh, pick, whole = ctx.given
        return None, None, None, None, _split(mesh, pick, whole, grad)


def _split(mesh: MeshRanks, pick: Sequence[int], whole: bool, grad: Tensor) -> Tensor:
    if not whole:  # each rank's is a share of the whole
        dtype, grad = grad.dtype, grad.to(wide(grad), copy=True, memory_format=torch.contiguous_format)
        grad = mesh.ring.all_reduce(mesh.ulysses.all_reduce(grad)).to(dtype)
    return _picked(grad, pick).contiguous()


def _placed(text: Tensor, pick: Sequence[int], heads: int) -> Tensor:
    """Heads of this rank among zeros for those of others."""
    total = torch.zeros(*text.shape[:2], heads, *text.shape[3:], dtype=wide(text), device=text.device)
    _add_heads(total, pick, text)
    return total


def _add_heads(total: Tensor, pick: Sequence[int], part: Tensor) -> None:
    """Add heads to those that they are; numbers in a row need no tensor, which a device would be sent."""
    if not pick:
        return
    if tuple(pick) == tuple(range(pick[0], pick[0] + len(pick))):
        total.narrow(2, pick[0], len(pick)).add_(part)
    else:
        total.index_add_(2, torch.tensor(pick, device=part.device), part.to(total.dtype))


def text_heads(
    plan: Plan, mesh: MeshRanks, whole: bool, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads of this rank, of text that all ranks hold."""
    mine = plan.heads[mesh.ulysses.index]
    picks = (_queries(mine), mine.keys, mine.keys)
    apply: Callable[..., Tensor] = _TextHeads.apply
    q, k, v = (apply(mesh, pick, whole, t) for pick, t in zip(picks, (query, key, value), strict=True))
    return q, k, v


def join_heads(plan: Plan, mesh: MeshRanks, whole: bool, text: Tensor) -> Tensor:
    """Text results of this rank's heads, and those of others, on all ranks."""
    pick = _queries(plan.heads[mesh.ulysses.index])
    found: Tensor = _JoinHeads.apply(mesh, pick, plan.query_heads, whole, text)  # type: ignore[no-untyped-call]
    return found


def scattered(plan: Plan, mesh: MeshRanks, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Results, or their gradients, as `to_tokens` had them; no gradient is recorded."""
    if mesh.ulysses.size == 1:
        return tensors
    return _scatter_heads(plan, mesh, [[_queries(one) for one in plan.heads]] * len(tensors), tensors)


def picked_heads(plan: Plan, mesh: MeshRanks, text: Tensor) -> Tensor:
    """The heads of this rank, of results of the text."""
    return _picked(text, _queries(plan.heads[mesh.ulysses.index])).contiguous()


def split_heads(plan: Plan, mesh: MeshRanks, whole: bool, grad: Tensor) -> Tensor:
    """The same of their gradient, whole or the sum of shares."""
    return _split(mesh, _queries(plan.heads[mesh.ulysses.index]), whole, grad)


def all_segments(plan: Plan, mesh: MeshRanks, segments: Tensor) -> list[Tensor]:
    """The segments [B, S] of each rank of the ring, as it computes them: 4 bytes a token, and everybody has all."""
    batch, most = segments.shape[0], max(plan.lengths)
    mine = segments.new_zeros(batch, most)
    mine[:, : segments.shape[1]] = segments
    found = [mine]
    for ranks in (mesh.ulysses, mesh.ring):
        if ranks.size > 1:
            stacked = torch.stack(found).contiguous()
            into = [torch.empty_like(stacked) for _ in range(ranks.size)]
            dist.all_gather(into, stacked, group=ranks.group)
            found = [one for group in into for one in group.unbind()]
    whole = segments.new_zeros(batch, sum(plan.lengths))
    size = len(plan.heads)
    for ring, held in enumerate(plan.held):
        row = torch.cat([found[ring * size + u][:, :n] for u, n in enumerate(plan.group(ring))], 1)
        for (start, stop), part in zip(held, torch.split(row, [b - a for a, b in held], 1), strict=True):
            whole[:, start:stop] = part
    return [_rows(whole, spans).contiguous() for spans in plan.computed]
