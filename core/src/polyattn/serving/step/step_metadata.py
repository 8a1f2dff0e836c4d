"""This module holds what one group of layers needs of a step: tables, lengths, and views of them that are made on first
use."""

from __future__ import annotations

import abc
from array import array
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from ...contract import WRITTEN, PagedTables, StepView
from ...errors import InvalidInputError, UnsupportedRequestError
from ..kv_cache.pages import first_visible_page
from .batch import ForwardMode
from .staging import Memory
from .views import OF_LENGTHS, VIEWS

__all__ = ["Step"]


class Step:
    """Holds what one group of layers needs of a step. Views are made on first use and kept for all layers of the step.

    N counts rows and T_q new tokens, padding included. The tensors are written anew by the next step; none of them is
    to be written by others.

    Attributes:
        mode, phase: of the batch. group: of the request table; window: of that group, -1 = full attention.
        sequences, tokens, padding: N, T_q, and how many of the last rows are padding.
        max_seqlen_q, max_seqlen_k: host ints, at least the longest; of static buffers max_seqlen_k is the capacity.
        page_size: tokens of a page of this step's tables.
        page_table: int32 [N, max_pages]; past the pages of a row there are any pages. Padding is on page 0.
        seq_lens: int32 [N], keys of each row, the new ones included; of padding the buffers' `padding_seq_len`.
        cu_seqlens_q: int32 [N+1].
        tree_mask: bool [N, N_d, N_d] of a step with a tree: which drafts each draft sees; else None.
        empty: no row has keys; read on the host.
        requests: int32 [N] each: the row of the request table, and 1, or 0 where the row of the step is padding.
    """

    mode: ForwardMode
    phase: Literal["extend", "decode", "verify"]
    group: int
    window: int
    sequences: int
    tokens: int
    padding: int
    max_seqlen_q: int
    max_seqlen_k: int
    page_size: int
    page_table: Tensor
    page_table_shape: tuple[int, int]
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    tree_mask: Tensor | None
    requests: tuple[Tensor, Tensor]
    empty: bool = False
    _slots: Tensor | None
    _positions: Tensor | None
    _lens: list[int]
    _queries: list[int]
    _starts: list[int]

    def __init__(self, memory: Memory, path: tuple[Hashable, ...]) -> None:
        self._memory, self._path = memory, path
        self._views: dict[str, Tensor] = {}
        self._derived: dict[Hashable, _Derived] = {}
        self._hosts: dict[str, Tensor] = {}
        self._lists: dict[str, list[int]] = {}
        self._tables: PagedTables | None = None
        self._counts: list[int] | None = None
        self.sequences = self.tokens = -1
        self.page_table_shape = (-1, -1)
        self._pages: Callable[[], list[Tensor]]
        self._page_lists: Callable[[], list[list[int]]] = lambda: [row.tolist() for row in self._pages()]

    # ------------------------------------------------------------------------------------------------------- views

    @property
    def slots(self) -> Tensor:
        """int64 [T_q]: where the new tokens are in the caches, page * page_size + place. Padding is on page 0."""
        return self._of_new_tokens("slots", self._slots)

    @property
    def positions(self) -> Tensor:
        """int64 [T_q]: where the new tokens are in their texts; in a tree prefix + depth. 0 in rows without keys."""
        return self._of_new_tokens("positions", self._positions)

    def _of_new_tokens(self, name: str, found: Tensor | None) -> Tensor:
        if found is None:
            raise InvalidInputError(
                f"a step of cross attention has no {name}: its keys are those of an encoder, written when that ran"
            )
        return found

    @property
    def cu_seqlens_k(self) -> Tensor:
        """int32 [N+1]."""
        return self._view("cu_seqlens_k")

    @property
    def page_counts(self) -> Tensor:
        """int32 [N]: pages that each row has keys in."""
        return self._view("page_counts")

    @property
    def kv_indptr(self) -> Tensor:
        """int32 [N+1]: the pages of row n are kv_indices[kv_indptr[n] : kv_indptr[n + 1]]."""
        return self._view("kv_indptr")

    @property
    def kv_indices(self) -> Tensor:
        """int32, the pages of all rows, one after another; longer in static buffers."""
        return self._view("kv_indices")

    @property
    def last_page_len(self) -> Tensor:
        """int32 [N]: keys in the last page of each row, 1 to page_size; 0 of a row without keys."""
        return self._view("last_page_len")

    @property
    def state_slots(self) -> Tensor:
        """int64 [N]: where layers that keep states by request have those of each row (`KVPool.states`); padding: -1."""
        return self._view("state_slots")

    @property
    def attn_mask(self) -> Tensor | None:
        """bool [N, 1, N_d, max_seqlen_k] of a step with a tree, as the contract has it; else None. Kernels that take
        `tree_mask` need far less memory."""
        return None if self.tree_mask is None else self._view("attn_mask")

    @property
    def tables(self) -> PagedTables:
        """The tables of the step, as kernels take them: made once for all layers."""
        if self._tables is None:
            self._tables = PagedTables(
                self.page_table,
                self.seq_lens,
                self.cu_seqlens_q,
                self.max_seqlen_q,
                self.max_seqlen_k,
                None if self.fixed else self.listed,
            )
        return self._tables

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The keywords of the contract that speak of the step: `tables` and, with a tree, `attn_mask`."""
        own = {"tables": self.tables}
        return own if self.tree_mask is None else {**own, "attn_mask": self.attn_mask}

    def at(self, page_size: int) -> Step:
        """The same step in other pages of the same memory: finer ones always, down to tokens (page_size 1), coarser
        ones where the pages of each row happen to lie in whole, aligned runs, which is read on the host.

        Raises:
            InvalidInputError: neither page size divides the other.
            UnsupportedRequestError: the pages of a row are not such runs.
        """
        if page_size == self.page_size:
            return self
        if page_size < 1 or (self.page_size % page_size and page_size % self.page_size):
            raise InvalidInputError(
                f"page_size={page_size}: pages of {self.page_size} tokens are read as pages of a divisor or a multiple "
                f"of {self.page_size}"
            )
        kind = _Finer if page_size < self.page_size else _Coarser
        return self._derive(("at", page_size), lambda path: kind(self, path, page_size))

    def windowed(self, window: int) -> Step:
        """The same step without the pages that no new token sees: tables and seq_lens begin with the first page that
        one does. A kernel applies the window itself, which counts from the end and stays the same.

        Args:
            window: earlier keys that a query sees (transformers' window minus 1); -1 gives this step.

        Raises:
            InvalidInputError: a step of cross attention, or a window below -1.
        """
        if window == -1:
            return self
        if window < -1 or self._slots is None:
            what = "a step of cross attention" if window >= 0 else "this step"
            raise InvalidInputError(
                f"window={window} for {what}: a window counts earlier keys of the same text, 0 or more (-1: all)"
            )
        return self._derive(("windowed", window), lambda path: _Windowed(self, path, window))

    def chunked(self, length: int, part: int) -> Step:
        """The same step cut at every `length` tokens of a text: a row has the new tokens of one such chunk, and the
        keys of that chunk (part 0), of the one before it (1), or of all earlier ones (2).

        Raises:
            InvalidInputError: pages that a chunk cuts, or a step with a tree or of cross attention.
        """
        if length % self.page_size or self.tree_mask is not None or self._slots is None:
            raise InvalidInputError(
                f"chunks of {length} tokens over pages of {self.page_size}: a chunk has whole pages, and its keys are "
                "those of the text, in a chain"
            )
        return self._derive(("chunked", length, part), lambda path: _Chunked(self, path, length, part))

    def host(self, name: str) -> Tensor:
        """A copy on the host, int32 on the CPU, made on first use from what the host knows: the device is not asked.
        For backends that plan from host lengths; nothing is made that nobody asks for. Pages are those that the request
        table has when they are asked for: do so before it changes again.

        Args:
            name: seq_lens, query_lens, cu_seqlens_q, cu_seqlens_k, kv_indptr, kv_indices, last_page_len or page_table
                (0 past the pages of a row).

        Raises:
            InvalidInputError: another name.
        """
        found = self._hosts.get(name)
        if found is None:
            made = _HOST_PAGES.get(name)
            found = self._hosts[name] = _on_host(self.listed(name)) if made is None else made(self)
        return found

    def listed(self, name: str) -> list[int]:
        """Return what is in `host(name)`, row by row; not to be written."""
        found = self._lists.get(name)
        if found is None:
            if name not in _HOST:
                raise InvalidInputError(f"host({name!r}): there is no such copy; {', '.join(_HOST)} are")
            found = self._lists[name] = _HOST[name](self)
        return found

    # --------------------------------------------------------------------------------------------- how they are made

    def take(self, name: str, dtype: torch.dtype, rows: int, *row: int) -> Tensor:
        """Memory of this step for a view, [rows, *row], where it was the last time."""
        shape = row if self.fixed else ()
        return self._memory.take((*self._path, name, *shape), dtype, rows, *row)

    @property
    def fixed(self) -> bool:
        """Return whether no shape may depend on lengths."""
        return self._memory.static

    @property
    def stale(self) -> bool:
        """Return whether the tensors are those of the step before: this one is planned and not prepared."""
        return self._memory.staged

    def counting(self, count: int) -> Tensor:
        """int32 0, 1, ..., count - 1."""
        return self._memory.counting(count)

    @property
    def page_entries(self) -> tuple[int, ...]:
        """Room for `kv_indices`: as many as there are, or in static buffers a shape that no length changes."""
        return tuple(self.page_table.shape) if self.fixed else (sum(self._page_counts()),)

    def _key_lens(self) -> list[int]:
        return self._lens

    def _page_counts(self) -> list[int]:
        if self._counts is None:
            size = self.page_size
            self._counts = [-(-keys // size) for keys in self._key_lens()]
        return self._counts

    def _view(self, name: str) -> Tensor:
        found = self._views.get(name)
        if found is None:
            view = VIEWS[name]
            found = self._views[name] = view.memory(self, name)
            self._memory.changed += 1
            if self._filled_when_asked:
                view.write(self, found)
        return found

    @property
    def _filled_when_asked(self) -> bool:
        """Return whether views are written when they are asked for. Views of a planned step are written when it is
        prepared, which is not seen here for a graph."""
        return self.fixed or not self.stale

    def _derive(self, key: Hashable, make: Callable[[tuple[Hashable, ...]], _Derived]) -> Step:
        found = self._derived.get(key)
        if found is None:
            found = make((*self._path, key))
            found.replan()
            self._memory.changed += 1
            if self._filled_when_asked:
                found.fill()
            self._derived[key] = found
        return found

    def replan(self) -> None:
        """Host side of the next step: what was read of the last one on the host is forgotten, and what was asked of it
        has the size of this one."""
        self._hosts.clear()
        self._lists.clear()
        self._tables = self._counts = None
        if not self.fixed:
            for name in self._views:
                self._views[name] = VIEWS[name].memory(self, name)
            # Whether runs are aligned is read of every step that asks.
            self._derived = {key: step for key, step in self._derived.items() if not isinstance(step, _Coarser)}
        for derived in self._derived.values():
            derived.replan()

    def refresh(self, written: Collection[Step] = ()) -> None:
        """Device side: everything that was asked of this step so far is written anew, in place.

        Args:
            written: steps whose tables are written already.
        """
        tables = self in written
        for name in [name for name in VIEWS if name in self._views]:
            if not tables or name not in WRITTEN:
                VIEWS[name].write(self, self._views[name])
        for derived in self._derived.values():
            if derived not in written:
                derived.fill()
            derived.refresh(written)

    def from_table(self, window: int = -1) -> Iterator[tuple[Step, StepView]]:
        """Return what can be written from the request table alone of this step and of those derived from it."""
        tensors = {"page_table": self.page_table, **{n: t for n, t in self._views.items() if n in WRITTEN}}
        if isinstance(self, _Windowed):
            tensors["seq_lens"] = self.seq_lens
        yield self, StepView(self.page_size, window, self.page_table.shape[1], tensors)
        for derived in self._derived.values():
            if isinstance(derived, _Repaged) and not isinstance(self, _Repaged):
                yield from derived.from_table(window)
            elif isinstance(derived, _Windowed) and not isinstance(self, _Derived):
                yield from derived.from_table(derived.seen)


class _Derived(Step, abc.ABC):
    """A step in other pages than `source`, or with fewer."""

    def __init__(self, source: Step, path: tuple[Hashable, ...]) -> None:
        super().__init__(source._memory, path)
        self._source = source

    def replan(self) -> None:
        for name in _SHARED:
            setattr(self, name, getattr(self._source, name))
        self.plan()
        super().replan()

    @abc.abstractmethod
    def plan(self) -> None:
        """Host side of what differs, and memory for the tables that do."""

    @abc.abstractmethod
    def fill(self) -> None:
        """Write those tables, on the device."""


_SHARED = (
    "mode", "phase", "group", "window", "sequences", "tokens", "padding", "max_seqlen_q", "max_seqlen_k", "page_size",
    "seq_lens", "cu_seqlens_q", "tree_mask", "requests", "_slots", "_positions", "_queries", "_starts",
)  # fmt: skip


class _Repaged(_Derived):
    """Other pages: lengths stay."""

    def __init__(self, source: Step, path: tuple[Hashable, ...], page_size: int) -> None:
        super().__init__(source, path)
        self._own_page_size = page_size

    def plan(self) -> None:
        self.page_size = self._own_page_size

    def _key_lens(self) -> list[int]:
        return self._source._key_lens()

    def _view(self, name: str) -> Tensor:
        return self._source._view(name) if name in OF_LENGTHS else super()._view(name)


class _Finer(_Repaged):
    def plan(self) -> None:
        super().plan()
        times = self._source.page_size // self.page_size
        table = self._source.page_table
        self._cells = self.take("page_table", torch.int32, self.sequences, table.shape[1], times)
        self.page_table = self._cells.flatten(1)
        self._pages = self._finer_pages

    def _finer_pages(self) -> list[Tensor]:
        times = self._cells.shape[2]
        inside = torch.arange(times, dtype=torch.int32, device="cpu")
        return [
            torch.add(inside, row[:, None], alpha=times).flatten()[:count]
            for row, count in zip(self._source._pages(), self._page_counts(), strict=True)
        ]

    def fill(self) -> None:
        times = self._cells.shape[2]
        torch.add(self.counting(times), self._source.page_table.unsqueeze(-1), alpha=times, out=self._cells)


class _Coarser(_Repaged):
    def plan(self) -> None:
        super().plan()
        times = self.page_size // self._source.page_size
        table = self._source.host("page_table")
        runs = torch.nn.functional.pad(table, (0, -table.shape[1] % times)).view(len(table), -1, times)
        inside = torch.arange(times, dtype=torch.int32, device="cpu")
        count = torch.tensor(self._source._page_counts(), dtype=torch.int32, device="cpu")[:, None]
        there = (torch.arange(runs[0].numel() if len(runs) else 0, device="cpu") < count).view_as(runs)
        wrong = ((runs != runs[..., :1] + inside) & there).any(-1) | (runs[..., 0] % times != 0)
        wrong &= runs.any(-1)  # pages that were given back are all the padding page
        if bool(wrong.any()):
            n, at = wrong.nonzero()[0].tolist()
            run = self._source._pages()[n][at * times : (at + 1) * times].tolist()
            raise UnsupportedRequestError(
                f"page_size={self.page_size}: row {n} has pages {run} of {self._source.page_size} tokens, no "
                f"aligned run of {times}. Allocate the pool in pages of {self.page_size}, or use a backend that "
                f"takes pages of {self._source.page_size}"
            )
        self._pages = lambda: [torch.div(row[::times], times, rounding_mode="floor") for row in self._source._pages()]
        columns = -(-self._source.page_table.shape[1] // times)
        self.page_table = self.take("page_table", torch.int32, self.sequences, columns)

    def fill(self) -> None:
        times = self.page_size // self._source.page_size
        torch.div(self._source.page_table[:, ::times], times, rounding_mode="floor", out=self.page_table)


class _Windowed(_Derived):
    """Rows begin with the first page that a new token sees."""

    def __init__(self, source: Step, path: tuple[Hashable, ...], seen: int) -> None:
        super().__init__(source, path)
        self.seen = seen

    def plan(self) -> None:
        # Whatever the lengths are: what is needed of each of them on the host is made when it is asked for.
        longest = self.seen + self.max_seqlen_q + self.page_size - 1
        self.max_seqlen_k = min(self._source.max_seqlen_k, longest)
        columns = max(-(-self.max_seqlen_k // self.page_size), 1)
        self.seq_lens = self.take("seq_lens", torch.int32, self.sequences)
        self.page_table = self.take("page_table", torch.int32, self.sequences, columns)
        self._pages = lambda: [
            row[first:] for row, first in zip(self._source._pages(), self._first_pages(), strict=True)
        ]

    def _first_pages(self) -> list[int]:
        lens = zip(self._source._key_lens(), self._queries, strict=True)
        return [first_visible_page(max(keys - new, 0), self.seen, self.page_size) for keys, new in lens]

    def _key_lens(self) -> list[int]:
        lens = zip(self._source._key_lens(), self._first_pages(), strict=True)
        return [keys - first * self.page_size for keys, first in lens]

    def fill(self) -> None:
        (N, columns), table = self.page_table.shape, self._source.page_table
        lens, cu, first = self._source.seq_lens, self.cu_seqlens_q, self.take("first_page", torch.int32, N)
        # seq_len - query_len - window, in pages: the first page that the first new token sees.
        if self.tokens == N * self.max_seqlen_q:
            torch.sub(lens, self.max_seqlen_q + self.seen, out=first)
        else:
            torch.sub(lens, cu[1:], out=first).add_(cu[:-1]).sub_(self.seen)
        first.clamp_(min=0).div_(self.page_size, rounding_mode="floor")
        torch.sub(lens, first, alpha=self.page_size, out=self.seq_lens)
        if N:
            where = self.take("page_places", torch.int32, N, columns)
            torch.add(first[:, None], self.counting(columns), out=where).clamp_(max=table.shape[1] - 1)
            where.add_(self.counting(N)[:, None], alpha=table.shape[1])
            torch.index_select(table.reshape(-1), 0, where.view(-1), out=self.page_table.view(-1))


class _Chunked(_Derived):
    """Rows are parts of the source's rows. Those of a decode step are found on the device, so that it may be recorded;
    of other steps the host knows them."""

    def __init__(self, source: Step, path: tuple[Hashable, ...], length: int, part: int) -> None:
        super().__init__(source, path)
        self._length, self._part = length, part

    def plan(self) -> None:
        rows = list(self._cut())
        decode, device = self.mode is ForwardMode.DECODE, self.cu_seqlens_q.device
        self._rows, self._chunks, self._ends = ([row[n] for row in rows] for n in range(3))
        self.sequences = len(rows)
        if not decode:
            self._queries = [row[3] for row in rows]
            self._starts = [0, *accumulate(self._queries)]
            self.max_seqlen_q = max(self._queries, default=0)
            self.cu_seqlens_q = torch.tensor(self._starts, dtype=torch.int32, device=device)
            self._sent = torch.tensor([self._rows, self._chunks, self._ends], dtype=torch.int32, device=device)
        source, keys = self._source.max_seqlen_k, self._key_lens()
        most = min(self._length, source) if self._part < 2 else source
        self.max_seqlen_k = most if self.fixed else max(keys, default=0)
        self.empty = not self.fixed and not any(keys)
        self.seq_lens = self.take("seq_lens", torch.int32, self.sequences)
        columns = max(-(-self.max_seqlen_k // self.page_size), 1)
        self.page_table = self.take("page_table", torch.int32, self.sequences, columns)
        self._pages = self._own_pages

    def _cut(self) -> Iterator[tuple[int, int, int, int]]:
        """(row of the source, chunk, keys up to its end, new tokens) of each row."""
        lens = zip(self._source._key_lens(), self._source._queries, strict=True)
        for n, (keys, new) in enumerate(lens):
            end = max(keys - new, 0)
            chunk = end // self._length
            while end + self._length - end % self._length < keys:
                start, end = end, end + self._length - end % self._length
                yield n, chunk, end, end - start
                new, chunk = new - (end - start), chunk + 1
            yield n, chunk, keys, new

    def _key_lens(self) -> list[int]:
        if self._part == 0:
            return [end - chunk * self._length for end, chunk in zip(self._ends, self._chunks, strict=True)]
        if self._part == 1:
            return [min(chunk, 1) * self._length for chunk in self._chunks]
        return [max(chunk - 1, 0) * self._length for chunk in self._chunks]

    def _own_pages(self) -> list[Tensor]:
        pages, counts = self._source._pages(), self._page_counts()
        size = self._length // self.page_size
        first = [max(chunk - self._part, 0) * size if self._part < 2 else 0 for chunk in self._chunks]
        return [pages[n][at : at + count] for n, at, count in zip(self._rows, first, counts, strict=True)]

    def fill(self) -> None:
        N, length, table = self.sequences, self._length, self._source.page_table
        if not N:
            return
        if self.mode is ForwardMode.DECODE:
            rows, ends = self.counting(N), self._source.seq_lens
            chunks = self.take("chunks", torch.int32, N)
            torch.sub(ends, 1, out=chunks).clamp_(min=0).div_(length, rounding_mode="floor")
        else:
            rows, chunks, ends = self._sent
        first = self.take("first_page", torch.int32, N)
        torch.sub(chunks, min(self._part, 1), out=first).clamp_(min=0)
        if self._part == 0:
            torch.sub(ends, first, alpha=length, out=self.seq_lens)
        elif self._part == 1:
            torch.clamp(chunks, max=1, out=self.seq_lens).mul_(length)
        else:
            torch.mul(first, length, out=self.seq_lens)
            first.zero_()
        columns = self.page_table.shape[1]
        where = self.take("page_places", torch.int32, N, columns)
        first.mul_(length // self.page_size)
        torch.add(first[:, None], self.counting(columns), out=where).clamp_(max=table.shape[1] - 1)
        where.add_(rows[:, None], alpha=table.shape[1])
        torch.index_select(table.reshape(-1), 0, where.view(-1), out=self.page_table.view(-1))


def _last_page_lens(step: Step) -> list[int]:
    size = step.page_size
    return [(keys - 1) % size + 1 if keys else 0 for keys in step._key_lens()]


def _padded_pages(step: Step) -> list[int]:
    columns = step.page_table.shape[1]
    found: list[int] = []
    for row in step._page_lists():
        found += row
        found += [0] * (columns - len(row))
    return found


def _joined_pages(step: Step) -> list[int]:
    found: list[int] = []
    for row in step._page_lists():
        found += row
    return found


def _on_host(numbers: list[int]) -> Tensor:
    if not numbers:
        return torch.empty(0, dtype=torch.int32, device="cpu")
    return torch.frombuffer(array("i", numbers), dtype=torch.int32)


def _host_page_table(step: Step) -> Tensor:
    if not (rows := step._pages()):
        return torch.zeros(step.page_table.shape, dtype=torch.int32, device="cpu")
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return torch.nn.functional.pad(padded, (0, step.page_table.shape[1] - padded.shape[1]))


def _host_kv_indices(step: Step) -> Tensor:
    return torch.cat(step._pages()) if step.sequences else torch.empty(0, dtype=torch.int32, device="cpu")


_HOST: Mapping[str, Callable[[Step], list[int]]] = {
    "seq_lens": lambda step: step._key_lens(),
    "query_lens": lambda step: step._queries,
    "cu_seqlens_q": lambda step: step._starts,
    "cu_seqlens_k": lambda step: [0, *accumulate(step._key_lens())],
    "kv_indptr": lambda step: [0, *accumulate(step._page_counts())],
    "kv_indices": _joined_pages,
    "last_page_len": _last_page_lens,
    "page_table": _padded_pages,
}

_HOST_PAGES: Mapping[str, Callable[[Step], Tensor]] = {"kv_indices": _host_kv_indices, "page_table": _host_page_table}
"""Those that grow with the context: they are copied in memory, not number by number."""
