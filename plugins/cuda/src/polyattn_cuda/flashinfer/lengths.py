"""Lengths of a step on the host, where FlashInfer plans, and masks as it takes them: of all sequences, one after
another."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.records import AttentionRequest

__all__ = ["Lengths", "Mask", "flattened", "mask_rule", "sighted", "tree_rule"]

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
    def read(cls, cu_seqlens_q: Tensor, seq_lens: Tensor, page_size: int) -> Lengths:
        """Those of a call: the device is waited for, once."""
        both = torch.cat([cu_seqlens_q, seq_lens]).cpu()
        starts, keys = both[: cu_seqlens_q.shape[0]], both[cu_seqlens_q.shape[0] :]
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


class Mask(NamedTuple):
    """`flat` bool: for each sequence [S_q, S_k], row by row. `alive` bool [T_q]: queries that see some key."""

    flat: Tensor
    alive: Tensor


def flattened(request: AttentionRequest, lens: Lengths, rule: Rule, device: torch.device) -> Mask:
    """A mask with the request's causal rule and window in it: a custom mask takes their place in the kernels."""
    queries, keys = lens.queries.long(), lens.seq_lens.long()
    sizes = queries * keys
    facts = torch.stack([sizes.cumsum(0), queries, keys, lens.cu_seqlens_q[:-1].long()])
    ends, queries, keys, first = facts.to(device, non_blocking=True)
    place = torch.arange(int(sizes.sum()), device=device)
    sequence = torch.searchsorted(ends, place, right=True)
    width = keys[sequence]
    place = place - (ends - queries * keys)[sequence]
    row, column = place // width, place % width
    offset = width - queries[sequence]
    seen = rule(sequence, row, column, offset)
    if request.causal != "none":
        seen = seen & (column <= row + offset)
    if request.window[0] >= 0:
        seen = seen & (column >= row + offset - request.window[0])
    alive = torch.zeros(lens.tokens, dtype=torch.int32, device=device)
    alive.index_add_(0, first[sequence] + row, seen.int())
    return Mask(seen, alive > 0)


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
