"""Rows of tokens in pools of pages: where the tokens of a call lie, and what is stored there as real numbers (S9).

Nothing here waits for the device, and no shape depends on what is in a tensor, so all of it can be recorded into a
device graph.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..contract import AttentionRequest, PagedTables
from .kv_quant import mla_unpack, real, stored

__all__ = ["Pool", "Slots", "Tokens", "by_number", "from_column", "in_use", "owned", "renumbered"]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The query tokens of a call, which are the last tokens of their sequences.

    Attributes:
        sequence: int64 [T_q], whose it is. row: int64 [T_q], which of its queries. position: int64 [T_q], its place
            among the keys. real: bool [T_q], False for the queries of a padding row, which has no keys.
    """

    sequence: Tensor
    row: Tensor
    position: Tensor
    real: Tensor

    @classmethod
    def of(cls, query: Tensor, tables: PagedTables) -> Tokens:
        seq_lens, cu_seqlens_q = tables.seq_lens, tables.cu_seqlens_q
        token = torch.arange(query.shape[0], device=query.device, dtype=torch.int32)
        sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), token, right=True)
        row = token - cu_seqlens_q[sequence]
        position = seq_lens[sequence] - (cu_seqlens_q[sequence + 1] - token)
        return cls(sequence, row.long(), position.clamp(min=0).long(), position >= 0)

    def slots(self, page_table: Tensor, page_size: int) -> Slots:
        """Return where the rows of these tokens are in a cache."""
        page_table = _some_columns(page_table)
        column = (self.position // page_size).clamp(max=page_table.shape[1] - 1)
        page = page_table[self.sequence, column].long()
        return Slots(page.where(self.real, 0), (self.position % page_size).where(self.real, 0), self.real)


class Slots:
    """Places of tokens: page and place in it, int64 [T]. Both are 0 where `real`, bool [T], is not; None: all are.

    Attributes:
        flat: page * page_size + place, int64 [T], where that is known: one number finds a row faster than two.
    """

    def __init__(self, page: Tensor, place: Tensor, real: Tensor | None) -> None:
        self.real = real
        self.flat: Tensor | None = None
        self._made: Callable[[], tuple[Tensor, Tensor]] = lambda: (page, place)

    @classmethod
    def numbered(cls, flat: Tensor, page_size: int) -> Slots:
        """Make them from numbers of tokens [T], all of them real."""
        found = cls(flat, flat, None)
        found.flat, found._made = flat, lambda: (flat // page_size, flat % page_size)
        return found

    @functools.cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        return self._made()

    @property
    def page(self) -> Tensor:
        return self._places[0]

    @property
    def place(self) -> Tensor:
        return self._places[1]


class Pool:
    """A KV cache [pages, page_size, H_kv, D] (NHD), [pages, H_kv, page_size, D] (HND) or [pages, page_size, D] (mla,
    or its FP8 rows) with its scales, as numbers."""

    def __init__(self, request: AttentionRequest, cache: Tensor, scale: Tensor | None = None) -> None:
        self.cache, self._per_token = cache, request.kv_scales in ("token", "block16")
        self._head_axis = 1 if request.kv_layout == "HND" else 2
        self._bytes = request.family == "mla" and cache.dtype.itemsize == 1
        if scale is not None and not self._per_token:
            scale = scale.reshape(-1, *[1] * (3 - self._head_axis))
        elif scale is not None and request.kv_scales == "token":
            scale = scale.unsqueeze(-1)
        self._scale = scale

    def _real(self, rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return mla_unpack(rows).to(dtype) if self._bytes else real(rows, scale, dtype)

    def _by_token(self, tensor: Tensor) -> Tensor:
        """[pages, page_size, H_kv, ...]"""
        return tensor.unsqueeze(2) if tensor.ndim == 3 else tensor.transpose(1, 2) if self._head_axis == 1 else tensor

    def _scale_at(self, slots: Slots) -> Tensor | None:
        """Broadcastable to rows [T, H_kv, ...]."""
        if self._scale is None:
            return None
        return self._by_token(self._scale)[slots.page, slots.place] if self._per_token else self._scale.reshape(-1, 1)

    def _numbered(self, slots: Slots) -> tuple[Tensor, Tensor, torch.Size] | None:
        """([tokens, H_kv, ...], int64 [T], their shape): the cache by numbers of tokens, where they follow each other
        in memory."""
        if slots.flat is None or self._head_axis == 1 or (cache := by_number(self.cache)) is None:
            return None
        return cache.unsqueeze(1) if cache.ndim == 2 else cache, slots.flat.reshape(-1), slots.flat.shape

    def pages(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Real values of pages [M] in the layout of the cache: [M, ...]."""
        scale = self._scale[index] if self._per_token and self._scale is not None else self._scale
        return self._real(self.cache[index], scale, dtype)

    def rows(self, slots: Slots, dtype: torch.dtype, new: Tensor | None = None) -> Tensor:
        """Real values of tokens [T, H_kv, D]: what is stored of them, or what the cache would store of `new` ones."""
        scale = self._scale_at(slots)
        if new is not None:
            return real(stored(new, scale, self.cache.dtype), scale, dtype)
        if (numbered := self._numbered(slots)) is None:
            return self._real(self._by_token(self.cache)[slots.page, slots.place], scale, dtype)
        return self._real(torch.unflatten(numbered[0].index_select(0, numbered[1]), 0, numbered[2]), scale, dtype)

    def write(self, slots: Slots, new: Tensor) -> None:
        """Store rows [T, H_kv, D]; those of tokens that are not real are not written."""
        if not new.shape[0] or not self.cache.shape[0]:
            return
        cache, rows = self._by_token(self.cache), stored(new, self._scale_at(slots), self.cache.dtype)
        if cache.dtype.itemsize == 1:
            cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
        if slots.real is None:
            if (numbered := self._numbered(slots)) is not None and cache.dtype is self.cache.dtype:
                numbered[0].index_copy_(0, numbered[1], rows)
            else:
                cache[slots.page, slots.place] = rows
            return
        # Others write again what some real token writes or, where there is none, what is there already.
        some = slots.real.int().argmax(0, keepdim=True)
        page, place = (where.where(slots.real, where[some]) for where in (slots.page, slots.place))
        spare = rows[some].where(slots.real[some, None, None], cache[page[some], place[some]])
        cache[page, place] = rows.where(slots.real[:, None, None], spare)


def _some_columns(page_table: Tensor) -> Tensor:
    """`page_table`, or where it has no columns one that nobody reads."""
    return page_table if page_table.shape[1] else page_table.new_zeros(page_table.shape[0], 1)


def by_number(cache: Tensor) -> Tensor | None:
    """A cache [pages, page_size, ...] as [tokens, ...], without a copy; None where tokens do not follow each other."""
    return cache.flatten(0, 1) if cache.stride(0) == cache.shape[1] * cache.stride(1) else None


def in_use(tables: PagedTables, page_size: int) -> Tensor:
    """The columns [N, columns] of a page table that sequences of at most `max_seqlen_k` tokens use, at least one."""
    return _some_columns(tables.page_table)[:, : max(-(-tables.max_seqlen_k // page_size), 1)]


def owned(tables: PagedTables, page_size: int) -> Tensor:
    """The pages that sequences of at most `max_seqlen_k` tokens own, int64 [N, columns]; page 0 past their ends, where
    a table holds anything."""
    page_table = in_use(tables, page_size)
    first = torch.arange(page_table.shape[1], device=page_table.device) * page_size
    return page_table.long().where(first < tables.seq_lens[:, None], 0)


def renumbered(pages: Tensor) -> Tensor:
    """The page table int32 [N, columns] of a cache that holds these pages [N, columns] one after another."""
    return torch.arange(pages.numel(), dtype=torch.int32, device=pages.device).view(pages.shape)


def from_column(table: Tensor, first: Tensor, count: int) -> Tensor:
    """`count` columns of `table` [N, ..., columns], from column `first` [N] on; past the end the last one again."""
    columns = torch.arange(count, device=table.device) + first.view(-1, *[1] * (table.ndim - 1))
    columns = columns.clamp(0, table.shape[-1] - 1).long()
    return table.gather(-1, columns.expand(*table.shape[:-1], -1))
