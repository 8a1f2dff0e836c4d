"""Lengths of a step on the host, where FlashInfer plans, and masks as it takes them: of all sequences, one after
another."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, PagedTables, UnsupportedRequestError

__all__ = ["Lengths", "Mask", "Piece", "cut", "flattened", "mask_rule", "sighted", "tree_rule"]

_PAIRS = 1 << 31
"""Pairs of a query and a key from which on FlashInfer's `mask_indptr`, int32 over all of them, wraps around."""
_BLOCK = 1 << 21
"""Pairs of a mask that are looked at at once: of temporary int32 tensors over them there are about ten."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(sequence, row, column, column of row 0) of pairs of a query and a key -> bool, whether the query sees the key."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Of a batch, on the host.

    Attributes:
        host: name -> int32, made when it is asked for: cu_seqlens_q [N+1]; seq_lens [N]; kv_indptr [N+1], pages counted
            up; last_page_len [N], 0 for a row without keys. listed: the same as lists.
        single: whether every sequence has one query.
    """

    host: Callable[[str], Tensor]
    listed: Callable[[str], list[int]]
    single: bool

    @classmethod
    def given(cls, cu_seqlens_q: Tensor, seq_lens: Tensor, kv_indptr: Tensor, last_page_len: Tensor) -> Lengths:
        made = {
            "cu_seqlens_q": cu_seqlens_q, "seq_lens": seq_lens, "kv_indptr": kv_indptr, "last_page_len": last_page_len,
        }  # fmt: skip
        starts = cu_seqlens_q.tolist()
        return cls(made.__getitem__, lambda name: made[name].tolist(), starts == list(range(len(starts))))

    @classmethod
    def read(cls, tables: PagedTables, page_size: int) -> Lengths:
        """Those of a call: the caller's, or else the device is waited for, once."""
        if tables.host is not None:
            return cls.paged(_host(tables.listed("cu_seqlens_q")), _host(tables.listed("seq_lens")), page_size)
        both, count = torch.cat([tables.cu_seqlens_q, tables.seq_lens]).cpu(), tables.cu_seqlens_q.shape[0]
        return cls.paged(both[:count], both[count:], page_size)

    @classmethod
    def paged(cls, starts: Tensor, keys: Tensor, page_size: int) -> Lengths:
        """Of int32 [N+1] and [N] on the host."""
        pages = (keys + page_size - 1) // page_size
        return cls.given(starts, keys, _starts(pages), (keys - (pages - 1) * page_size).minimum(keys))

    @classmethod
    def of(cls, step: Any) -> Lengths:
        """Those of a serving step, as the host knows them."""
        return cls(step.host, step.listed, step.max_seqlen_q == 1 and step.tokens == step.sequences)

    @property
    def cu_seqlens_q(self) -> Tensor:
        return self.host("cu_seqlens_q")

    @property
    def seq_lens(self) -> Tensor:
        return self.host("seq_lens")

    @property
    def kv_indptr(self) -> Tensor:
        return self.host("kv_indptr")

    @property
    def last_page_len(self) -> Tensor:
        return self.host("last_page_len")

    @functools.cached_property
    def queries(self) -> Tensor:
        """[N]"""
        return self.cu_seqlens_q.diff()

    @functools.cached_property
    def tokens(self) -> int:
        return self.listed("cu_seqlens_q")[-1]

    @functools.cached_property
    def pages(self) -> int:
        return self.listed("kv_indptr")[-1]

    def asked(self, page_table: Tensor) -> tuple[Lengths, Tensor]:
        """Those of the sequences with a query, and their rows of a table [N, max_pages] on the device."""
        kept = self.queries > 0
        pages = self.kv_indptr.diff()[kept]
        lens = self.given(_starts(self.queries[kept]), self.seq_lens[kept], _starts(pages), self.last_page_len[kept])
        return lens, page_table[kept.nonzero()[:, 0].to(page_table.device, non_blocking=True)]

    def page_list(self, page_table: Tensor) -> Tensor:
        """int32, the pages of all sequences, from a table [N, max_pages] on the device."""
        counts = self.kv_indptr.diff().long()
        row = torch.repeat_interleave(torch.arange(counts.shape[0], device="cpu"), counts)
        place = row * page_table.shape[1] + torch.arange(self.pages, device="cpu") - self.kv_indptr[row]
        return page_table.reshape(-1)[place.to(page_table.device, non_blocking=True)]


def _starts(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def sighted(request: AttentionRequest, lens: Lengths, device: torch.device) -> Tensor | None:
    """bool [T_q], the queries that see some key, without a mask; None = all. Decided on the host."""
    causal = request.causal != "none"
    # Under a causal mask the first of more queries than keys see none.
    lengths = lens.listed("seq_lens")
    if causal and not lens.single:
        starts = lens.listed("cu_seqlens_q")
        blind = any(map(operator.lt, lengths, map(operator.sub, starts[1:], starts)))
    else:
        blind = 0 in lengths
    if not blind:
        return None
    queries, keys = lens.queries, lens.seq_lens
    sequence = torch.repeat_interleave(torch.arange(keys.shape[0], device="cpu"), queries.long())
    seen = keys[sequence] > 0
    if causal:
        seen &= keys[sequence] - (lens.cu_seqlens_q[sequence + 1] - torch.arange(lens.tokens, device="cpu")) >= 0
    return seen.to(device, non_blocking=True)


class Piece(NamedTuple):
    """Consecutive queries of a batch, as a batch of their own: which they are, and which of the list of pages theirs
    are."""

    tokens: slice
    pages: slice
    lens: Lengths


def cut(request: AttentionRequest, lens: Lengths, room: int, rows: int) -> list[Piece]:
    """The batch in pieces of at most `room` tiles of `rows` rows (queries times heads), in order and with no query left
    out. Only the last sequence of a piece may go on in the next one: its last keys, which under a causal mask belong to
    later queries, are then missing, and so the pages of each piece lie one after another too.
    """
    heads, causal, size = request.heads, request.causal != "none", request.page_size
    starts, lengths, pages = (lens.listed(name) for name in ("cu_seqlens_q", "seq_lens", "kv_indptr"))
    made: list[Piece] = []
    counts, keys, left, begin, first = list[int](), list[int](), room, 0, 0

    def close(at: int, after: int) -> None:
        """End a piece before query `at`; the next begins with sequence `after`."""
        nonlocal left, begin, first
        if at > begin:
            of = Lengths.paged(_starts(torch.tensor(counts, device="cpu")), _host(keys), size)
            made.append(Piece(slice(begin, at), slice(pages[first], pages[first] + of.pages), of))
        counts.clear()
        keys.clear()
        left, begin, first = room, at, after

    for n, (at, end) in enumerate(pairwise(starts)):
        while (count := min(end - at, left * rows // heads)) < end - at:
            at += count
            if count:
                counts.append(count)
                keys.append(max(lengths[n] - (end - at), 0) if causal else lengths[n])
            close(at, n)
        counts.append(count)
        keys.append(lengths[n])
        left -= -(-count * heads // rows)
    close(starts[-1], len(lengths))
    return made


def _host(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


class Mask(NamedTuple):
    """`flat` bool: for each sequence [S_q, S_k], row by row. `alive` bool [T_q]: queries that see some key."""

    flat: Tensor
    alive: Tensor


def flattened(request: AttentionRequest, lens: Lengths, rule: Rule, device: torch.device) -> Mask:
    """A mask with the request's causal rule and window in it: a custom mask takes their place in the kernels. Beside
    the mask itself it takes little memory, however long the sequences are.

    Raises:
        UnsupportedRequestError: there are more pairs of a query and a key than FlashInfer counts.
    """
    sizes = lens.queries.long() * lens.seq_lens.long()
    pairs = int(sizes.sum())
    _check_pairs(pairs)
    facts = torch.stack([sizes.cumsum(0).int(), lens.queries, lens.seq_lens, lens.cu_seqlens_q[:-1]])
    on_device = facts.to(device, non_blocking=True)
    flat = torch.empty(pairs, dtype=torch.bool, device=device)
    alive = torch.zeros(lens.tokens, dtype=torch.int32, device=device)
    for start in range(0, pairs, _BLOCK):
        place = torch.arange(start, min(start + _BLOCK, pairs), dtype=torch.int32, device=device)
        token, seen = _seen(request, rule, place, *on_device)
        flat[start : start + _BLOCK] = seen
        alive.index_add_(0, token, seen.int())
    return Mask(flat, alive > 0)


def _check_pairs(pairs: int) -> None:
    """
    Raises:
        UnsupportedRequestError: there are too many.
    """
    if pairs >= _PAIRS:
        raise UnsupportedRequestError(
            f"FlashInfer counts the pairs of a query and a key that a mask speaks of in 31 bits, and the sequences of "
            f"this call have {pairs}: it takes fewer than {_PAIRS} at once. Call it for fewer sequences or queries at "
            f"a time, leave out a mask that only says causal= or window=, or name another backend"
        )


def _seen(
    request: AttentionRequest, rule: Rule, place: Tensor, ends: Tensor, queries: Tensor, keys: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """(query of the batch, whether it sees the key) of the pairs at these places of the flat mask; all int32.

    Args:
        place: [pairs]. ends: [N], the place after the last pair of each sequence. first: [N], its first query.
    """
    sequence = torch.searchsorted(ends, place, right=True, out_int32=True)
    width = keys[sequence]
    place = place - (ends - queries * keys)[sequence]
    row, column = place // width, place % width
    offset = width - queries[sequence]
    seen = rule(sequence, row, column, offset)
    if request.causal != "none":
        seen = seen & (column <= row + offset)
    if request.window[0] >= 0:
        seen = seen & (column >= row + offset - request.window[0])
    return first[sequence] + row, seen


def mask_rule(attn_mask: Tensor) -> Rule:
    """Of a mask [N|1, 1, max_seqlen_q, max_seqlen_k]."""
    one = attn_mask.shape[0] == 1
    return lambda sequence, row, column, offset: attn_mask[0 if one else sequence, 0, row, column]


def tree_rule(tree_mask: Tensor) -> Rule:
    """Of trees [N, N_d, N_d]: a draft sees all of the prefix."""

    def rule(sequence: Tensor, row: Tensor, column: Tensor, offset: Tensor) -> Tensor:
        draft = column - offset
        return (draft < 0) | tree_mask[sequence, row, draft.clamp(min=0)]

    return rule
