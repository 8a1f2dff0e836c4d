"""Batches in pieces, where one call of FlashAttention has no room for them.

Generations 2 and 4, and the backward of 3, put the samples of a batch on an axis of the grid, and CUDA's and HIP's end
at 65,535 there (flash_fwd_launch_template.h, flash_bwd_launch_template.h, tile_scheduler.py). The backward of 2 sums dQ
up in rows of its own, and finds those of a sample by an offset of 32 bits (flash_bwd_kernel.h, before 2.8.3.post2).
Which of them a build does is not asked: so large a batch loses little by a second call. But where packed sequences end
the host has to read for it, and so a recording of such a batch is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import GraphError

__all__ = ["MOST", "OutAndLSE", "Packed", "by_samples", "differentiable", "gradient", "packed_in_pieces"]

OutAndLSE = tuple[Tensor, Tensor | None]
"""What a kernel returns: its output, and its LSE or None."""

MOST = 65_535
"""Samples, or sequences, of one call."""
_OFFSETS = 2**31
_ROWS = 128
"""Queries that a sample's rows of dQ are rounded up to."""


class Packed(NamedTuple):
    """Says where the sequences of a packed batch are.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 [N+1], first 0, last T_q or T_k. max_seqlen_q, max_seqlen_k: host ints, at
            least the longest.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def _row(query: Tensor) -> int:
    """Numbers that dQ has for one query [..., H_q, D]: D rounded up to 32, above 128 to 64."""
    heads, width = query.shape[-2:]
    step = 32 if width <= 128 else 64
    return int(heads * -(-width // step) * step)


def most_samples(query: Tensor) -> int:
    """How many samples of [B, S_q, H_q, D] a call with a backward has room for."""
    return min(MOST, max((_OFFSETS - 1) // (max(-(-query.shape[1] // _ROWS), 1) * _ROWS * _row(query)), 1))


def by_samples(function: Callable[..., Any], most: int, *tensors: Tensor, **given: Any) -> tuple[Any, ...]:
    """`function` of at most so many samples at a time.

    Args:
        function: of tensors [B, ...] and keywords, of which `out` is such a tensor too; returns tensors [B, ...] and
            None, in a tuple or alone.
        tensors, given: of the whole batch.

    Returns:
        What it returns for the whole batch, as a tuple; with `out` that comes first.
    """
    out = given.pop("out", None)
    found = []
    for first in range(0, tensors[0].shape[0], most):
        piece = slice(first, first + most)
        more = {} if out is None else {"out": out[piece]}
        part = function(*(tensor[piece] for tensor in tensors), **given, **more)
        found.append(part if isinstance(part, tuple) else (part,))
    first_of, *others = zip(*found, strict=True)
    return (_joined(first_of, 0) if out is None else out, *(_joined(parts, 0) for parts in others))


class Piece(NamedTuple):
    """Some sequences of a packed batch: where their queries and keys are in it, and in the piece."""

    queries: slice
    keys: slice
    where: Packed

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Theirs of [query, key, value, and further ones that the queries have]."""
        query, key, value, *others = tensors
        return [query[self.queries], key[self.keys], value[self.keys], *(t[self.queries] for t in others)]


def sequences(query: Tensor, where: Packed, *, trained: bool) -> list[Piece]:
    """The pieces of a packed batch, none where one call has room for it. trained: whether there is a backward.

    Raises:
        GraphError: there are pieces, and a graph is being recorded: where they end the host has to read.
    """
    count, row = where.cu_seqlens_q.shape[0] - 1, _row(query) if trained else 0
    if count == 1 or (count <= MOST and (query.shape[0] + _ROWS * count) * row < _OFFSETS):
        return []
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise GraphError(
            f"{count} sequences of {query.shape[0]} queries are more than one call of FlashAttention has room for, and "
            f"where the next one begins cannot be read while a CUDA graph is recorded: pass at most {MOST} sequences, "
            f"and fewer than 2**31 numbers of queries rounded up to {_ROWS} for each sequence, or name another backend"
        )
    starts_q, starts_k = torch.stack([where.cu_seqlens_q, where.cu_seqlens_k]).tolist()
    return [_piece(where, starts_q, starts_k, a, b) for a, b in _cuts(starts_q, row)]


def _cuts(starts: list[int], row: int) -> Iterator[tuple[int, int]]:
    """(first, end) of the sequences of each piece: as many as there is room for, and one at least."""
    first = 0
    for end in range(1, len(starts)):
        count, tokens = end - first, starts[end] - starts[first]
        if count > 1 and (count > MOST or (tokens + _ROWS * count) * row >= _OFFSETS):
            yield first, end - 1
            first = end - 1
    yield first, len(starts) - 1


def _piece(where: Packed, starts_q: list[int], starts_k: list[int], first: int, end: int) -> Piece:
    queries, keys = (slice(starts[first], starts[end]) for starts in (starts_q, starts_k))
    own = slice(first, end + 1)
    cu_seqlens_q, cu_seqlens_k = where.cu_seqlens_q[own] - queries.start, where.cu_seqlens_k[own] - keys.start
    return Piece(queries, keys, where._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k))


def packed_in_pieces(
    function: Callable[..., OutAndLSE],
    empty: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    where: Packed,
    *,
    lse: bool,
    out: Tensor | None = None,
    **extra: Any,
) -> OutAndLSE:
    """Call `FlashAttentionKernels.packed` for more sequences than one call may have. empty: the LSE of a query without
    keys."""
    outs, lses = [], []
    for piece in sequences(query, where, trained=False):
        q, k, v = piece.of((query, key, value))
        more = extra if out is None else {**extra, "out": out[piece.queries]}
        if q.shape[0] and k.shape[0]:
            result, found = function(q, k, v, piece.where, lse=lse, **more)
        else:
            result = q.new_zeros(*q.shape[:2], v.shape[2]) if out is None else out[piece.queries].zero_()
            found = q.new_full(q.shape[1::-1], empty, dtype=torch.float32) if lse else None
        if out is None:
            outs.append(result)
        lses.append(found)
    return torch.cat(outs) if out is None else out, _joined(lses, -1)


def differentiable(function: Callable[..., Tensor], where: Packed | None, *tensors: Tensor) -> Tensor:
    """out of a function with a backward of its own, in as many calls as it takes; packed where `where` is given.

    Args:
        function: of query, key, value and, by name, what is in `where`.
    """
    query = tensors[0]
    if where is None:
        most = most_samples(query)
        found: Tensor = function(*tensors) if query.shape[0] <= most else by_samples(function, most, *tensors)[0]
        return found
    pieces = sequences(query, where, trained=True)
    if not pieces:
        return function(*tensors, **where._asdict())
    outs = []
    for piece in pieces:
        q, k, v = piece.of(tensors)
        # Of a query without keys nothing is left, whatever it holds; but it stays in the graph.
        none = q.masked_fill(torch.ones_like(q, dtype=torch.bool), 0)
        outs.append(function(q, k, v, **piece.where._asdict()) if q.shape[0] and k.shape[0] else none)
    return torch.cat(outs)


def gradient(
    function: Callable[..., tuple[Tensor, Tensor, Tensor]], where: Packed | None, *tensors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`FlashAttentionKernels.gradient` in as many calls as it takes. tensors: as there."""
    dout, query, key, value, out, lse = tensors
    if where is None:
        most = most_samples(query)
        if query.shape[0] <= most:
            return function(*tensors, where=None)
        dq, dk, dv = by_samples(function, most, *tensors, where=None)
        return dq, dk, dv
    pieces = sequences(query, where, trained=True)
    if not pieces:
        return function(*tensors, where=where)
    dq, dk, dv = (t.new_zeros(t.shape) for t in (query, key, value))
    for piece in pieces:
        q, k, v, given, result = piece.of((query, key, value, dout, out))
        if q.shape[0] and k.shape[0]:
            rows = lse[:, piece.queries].contiguous()
            found = function(given, q, k, v, result, rows, where=piece.where)
            for room, part in zip(piece.of((dq, dk, dv)), found, strict=True):
                room.copy_(part)
    return dq, dk, dv


def _joined(parts: Sequence[Tensor | None], axis: int) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there, axis) if there else None
