"""Unabsorbed latent attention of new tokens and their prefixes: pieces of keys, each up-projected and attended, merged.

A piece is planned on the host once per step and reused by all layers. Chunks are cut from the prefixes of all sequences
laid end to end, so that each but the last is full, and only the queries of the sequences that a chunk touches take part
in it. Partial results are merged in float32 (`polyattn.merge`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ...dispatch.varlen import varlen_attention
from ...semantics.merge_lse import merge
from .absorb import UpProjection, expand
from .policy import Decision

__all__ = ["Piece", "attend", "plan_pieces"]


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Queries and the keys they see in one varlen call.

    Attributes:
        queries: which of the step's tokens. cu_seqlens_q, cu_seqlens_k: int32 [N_p + 1]; max_seqlen_q, max_seqlen_k.
        causal: the queries are the last of these keys; else they see all of them.
        slots: int64 [T_k], where the keys' rows are in the cache; None = they are the rows of the new tokens.
    """

    queries: slice
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    slots: Tensor | None


def plan_pieces(
    decision: Decision,
    prefix_lens: Sequence[int],
    query_lens: Sequence[int],
    page_table: Tensor,
    page_size: int,
    chunk: int,
) -> list[Piece]:
    """The pieces of a step whose form is `unabsorbed`, `one_shot` or `chunked`.

    Args:
        prefix_lens, query_lens: [N] host lengths. page_table: int32 [N, max_pages], on the device of the rows.
        chunk: prefix tokens of one chunk, over all sequences.

    Returns:
        Pieces that show every query every key it may see once. There is nothing in it for an absorbed step.
    """
    if decision.form == "absorbed":
        return []
    device = page_table.device
    starts = _cumulative(query_lens)
    everyone = slice(0, starts[-1])
    if decision.form == "one_shot":
        spans = [(n, 0, p + q) for n, (p, q) in enumerate(zip(prefix_lens, query_lens, strict=True))]
        return [_piece(everyone, query_lens, spans, page_table, page_size, causal=True)]
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    longest = max(query_lens, default=0)
    pieces = [Piece(everyone, cu, cu, longest, longest, True, None)]
    if decision.form == "chunked":
        for spans in _cut(prefix_lens, chunk):
            first, last = spans[0][0], spans[-1][0]
            queries = slice(starts[first], starts[last + 1])
            lens = query_lens[first : last + 1]
            pieces.append(_piece(queries, lens, spans, page_table, page_size, causal=False))
    return pieces


def attend(
    pieces: Sequence[Piece],
    query: Tensor,
    rows: Tensor,
    read: Callable[[Tensor], Tensor],
    up: UpProjection,
    *,
    scale: float,
    backend: str | None = None,
) -> Tensor:
    """Attention of new tokens over the pieces.

    Args:
        query: [T, H, D_nope + D_r]. rows: [T, D_c + D_r], of the new tokens. read: slots [T_k] -> rows, in the dtype of
            `rows`. scale: see `softmax_scale`. backend: for `polyattn.varlen_attention`.

    Returns:
        [T, H, D_v].
    """
    # A query may take part in many chunks: sums in 16 bits would lose a little in each of them.
    wide = torch.promote_types(query.dtype, torch.float32)
    out: Tensor | None = None
    lse: Tensor | None = None
    for piece in pieces:
        key, value = expand(rows if piece.slots is None else read(piece.slots), up)
        result = varlen_attention(
            query[piece.queries],
            key,
            value,
            cu_seqlens_q=piece.cu_seqlens_q,
            cu_seqlens_k=piece.cu_seqlens_k,
            max_seqlen_q=piece.max_seqlen_q,
            max_seqlen_k=piece.max_seqlen_k,
            causal=piece.causal,
            scale=scale,
            return_lse=len(pieces) > 1,
            backend=backend,
        )
        if len(pieces) == 1:
            return result  # type: ignore[no-any-return]
        if out is None or lse is None:
            out, lse = result[0].to(wide), result[1].clone()
            continue
        where = piece.queries
        out[where], lse[where] = merge((out[where], result[0]), (lse[where], result[1]), layout="THD")
    return query.new_zeros(0, *up.w_uv.shape[:2]) if out is None else out.to(query.dtype)


_Span = tuple[int, int, int]
"""Sequence, first token, one past the last."""


def _cut(lens: Sequence[int], chunk: int) -> Iterator[list[_Span]]:
    """Spans of `chunk` tokens together, through all sequences in order."""
    room, spans = chunk, list[_Span]()
    for n, length in enumerate(lens):
        start = 0
        while start < length:
            stop = min(length, start + room)
            spans.append((n, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield spans
                room, spans = chunk, []
    if spans:
        yield spans


def _piece(
    queries: slice, query_lens: Sequence[int], spans: list[_Span], page_table: Tensor, page_size: int, *, causal: bool
) -> Piece:
    """A piece whose keys are `spans` of the sequences from the first of them on, those without a span having none."""
    first = spans[0][0]
    key_lens = [0] * len(query_lens)
    for n, start, stop in spans:
        key_lens[n - first] = stop - start
    cu_q, cu_k = (torch.tensor(_cumulative(lens), dtype=torch.int32) for lens in (query_lens, key_lens))
    return Piece(
        queries,
        cu_q.to(page_table.device),
        cu_k.to(page_table.device),
        max(query_lens, default=0),
        max(key_lens, default=0),
        causal,
        _slots(spans, page_table, page_size),
    )


def _slots(spans: Iterable[_Span], page_table: Tensor, page_size: int) -> Tensor:
    """Return where the tokens of spans are: int64 [T_k]."""
    sequence, token = [], []
    for n, start, stop in spans:
        sequence.append(torch.full((stop - start,), n))
        token.append(torch.arange(start, stop))
    index, place = (torch.cat(parts).to(page_table.device) for parts in (sequence, token))
    return page_table[index, place // page_size].long() * page_size + place % page_size


def _cumulative(lens: Sequence[int]) -> list[int]:
    return [0, *accumulate(lens)]
