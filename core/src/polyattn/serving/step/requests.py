"""This module tracks which pages a running request has, on the host and, for kernels, on the device."""

from __future__ import annotations

import dataclasses
import operator
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING

import torch

from ...errors import InternalError, InvalidInputError
from ..kv_cache.allocating import allocating
from ..kv_cache.pages import (
    PageAllocator,
    allocate_all,
    check_geometry,
    first_visible_page,
    held,
    release_all,
    share_all,
    whole,
)
from .staging import cells_of

if TYPE_CHECKING:
    from ...semantics.states import RequestStates
    from ..kv_cache.prefix_cache import Match

__all__ = ["PageCopy", "RequestTable"]


@dataclasses.dataclass(frozen=True)
class PageCopy:
    """Asks for a copy of page `source` of a group to page `target`, in every layer of the group, before the next step
    writes."""

    group: int
    source: int
    target: int


_Changes = dict[int, list[tuple[int, int]]]
"""Row -> spans of its entries."""


class _HostCopy:
    """Holds a table of a group in the memory of the host, and what changed since it was read last."""

    def __init__(self, requests: int, columns: int) -> None:
        with torch.inference_mode(False):
            self.flat = torch.zeros(requests * columns, dtype=torch.int32, device="cpu")
        self.cells = cells_of(self.flat)
        self.changed: _Changes = {}


class _Row:
    """Holds one request: its tokens that have a slot, and per group its pages, 0 before `first` of the group."""

    __slots__ = ("first", "length", "pages")

    def __init__(self, groups: int) -> None:
        self.length = 0
        self.pages: list[list[int]] = [[] for _ in range(groups)]
        self.first = [0] * groups


class RequestTable:
    """Page tables of the running requests, one table per group of layers.

    Changes are made on the host. `flush` brings them to the device. A call that raises has changed nothing.

    Args:
        requests: rows, that is requests that can run at the same time.
        max_tokens: tokens the longest request can have.
        page_size: tokens per page.
        windows: for each group the number of earlier keys that a query sees (transformers' window minus 1), -1 for
            full attention.
        allocators: of each group; they may be shared with others.
        device: of the tables.
        states: what the model's layers keep by request (`KVPool.states`), which lives as the rows do: a new row begins
            with zeros, a fork with a copy, and what a removed row had is forgotten. None = nothing is.

    Attributes:
        tables: for each group int32 [requests, max_pages] on `device`, 0 (the padding page) where a row has none.
        page_size, windows, allocators, max_tokens, states: as given.

    Raises:
        InvalidInputError: a count is under 1 or no whole number, or windows and allocators do not pair up.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        requests: int,
        max_tokens: int,
        page_size: int,
        windows: Sequence[int],
        allocators: Sequence[PageAllocator],
        device: torch.device | str = "cpu",
        *,
        states: RequestStates | None = None,
    ) -> None:
        check_geometry(page_size, windows, allocators)
        for name, count in (("requests", requests), ("max_tokens", max_tokens)):
            if whole(name, count) < 1:
                raise InvalidInputError(f"{name}={count}: a request table has room for 1 or more")
        if states is not None and states.requests != requests:
            raise InvalidInputError(
                f"the table has rows for {requests} requests, and states for {states.requests}: build both for as many"
            )
        self.states = states
        self.page_size, self.max_tokens = page_size, max_tokens
        self.windows, self.allocators = tuple(windows), tuple(allocators)
        self._columns = -(-max_tokens // page_size)
        shown = f"a request table of requests={requests} with max_tokens={max_tokens} in pages of {page_size} needs"
        with allocating(shown, "lower requests or max_tokens, or take larger pages"):
            self.tables = tuple(
                torch.zeros(requests, self._columns, dtype=torch.int32, device=device) for _ in self.windows
            )
            self._free = list(range(requests - 1, -1, -1))
        self._rows: dict[int, _Row] = {}
        self._changed: list[_Changes] = [{} for _ in self.windows]
        self._copies: dict[int, _HostCopy] = {}

    @property
    def rows(self) -> list[int]:
        """Rows that are requests, the oldest first."""
        return list(self._rows)

    @property
    def free(self) -> int:
        """Rows that are not."""
        return len(self._free)

    def length(self, row: int) -> int:
        """Tokens of `row` that have a slot."""
        return self._row(row).length

    def lengths(self, rows: Iterable[int]) -> list[int]:
        """`length` of many rows."""
        known = self._rows
        try:
            return [known[row].length for row in rows]
        except KeyError as exc:
            raise self._no_request(exc.args[0]) from None

    def first_shorter(self, rows: Sequence[int], lengths: Sequence[int]) -> int | None:
        """Return which of `rows` is the first with fewer tokens than its length here, None = none."""
        found = self.lengths(rows)
        if not any(map(operator.lt, found, lengths)):
            return None
        return next(i for i, (tokens, length) in enumerate(zip(found, lengths, strict=True)) if tokens < length)

    def pages(self, row: int, group: int) -> list[int]:
        """The pages of `row` in `group`, in the order of its tokens; 0 where one was given back by `slide`."""
        return list(self._row(row).pages[group])

    def first_pages(self, rows: Sequence[int], group: int, counts: Sequence[int]) -> list[torch.Tensor]:
        """The first `counts[i]` pages of `rows[i]`, which has as many: int32 on the CPU, until the table changes.

        They lie in a copy of the table that the host keeps from the first call on, and brings up to date by what
        changed; so a call costs time in proportion to the rows and to that, not to the pages.
        """
        self._all(rows)  # refuses those that are no requests
        copy = self._copies.get(group)
        if copy is None:
            copy = self._copies[group] = _HostCopy(self.tables[group].shape[0], self._columns)
            copy.changed = {row: [(0, len(found.pages[group]))] for row, found in self._rows.items()}
        for row, spans in copy.changed.items():
            pages = self._rows[row].pages[group] if row in self._rows else []
            for start, stop in spans:
                at, there = row * self._columns + start, pages[start:stop]
                copy.cells[at : at + len(there)] = array("i", there)
        copy.changed.clear()
        columns = self._columns
        return [copy.flat.narrow(0, row * columns, count) for row, count in zip(rows, counts, strict=True)]

    def first_page_lists(self, rows: Sequence[int], group: int, counts: Sequence[int]) -> list[list[int]]:
        """The same as lists, which are the table's own where they are whole: not to be written, or kept."""
        pages = [found.pages[group] for found in self._all(rows)]
        return [one if len(one) == count else one[:count] for one, count in zip(pages, counts, strict=True)]

    def held(self, group: int) -> Iterable[int]:
        """The pages of `group` that rows hold, one item for each time one does (`check_pages`)."""
        return chain.from_iterable(held(row.pages[group]) for row in self._rows.values())

    def add(self) -> int:
        """A new row without tokens.

        Raises:
            InvalidInputError: every row is in use.
        """
        self._check_free()
        row = self._free[-1]
        if self.states is not None:
            self.states.allocate(row)
        return self._begin(row)

    def _check_free(self) -> None:
        if not self._free:
            raise InvalidInputError(
                f"all {len(self._rows)} rows are in use: remove a request first, or build the table for more"
            )

    def _begin(self, row: int) -> int:
        self._free.pop()
        self._rows[row] = _Row(len(self.windows))
        return row

    def remove(self, row: int) -> None:
        """Give back the pages of `row`, and the row itself."""
        found = self._row(row)
        if self.states is not None:
            self.states.drop(row)
        release_all(self.allocators, found.pages)
        for group, pages in enumerate(found.pages):
            self._change(row, group, 0, len(pages))
        del self._rows[row]
        self._free.append(row)

    def wanted(self, row: int, tokens: int) -> tuple[int, ...]:
        """Pages of each group that `extend(row, tokens)` would take now.

        Raises:
            InvalidInputError: `tokens` is negative or no whole number, or `row` would be longer than `max_tokens`.
        """
        found, tokens = self._row(row), whole("tokens", tokens)
        new = self._new_pages(row, found, tokens)
        return tuple(new + self._copied(found, group, tokens, Counter()) for group in range(len(self.windows)))

    def extend(self, row: int, tokens: int) -> list[PageCopy]:
        """Give `tokens` more tokens of `row` a slot.

        Where the page that the first of them goes to is held by others too (a fork, a cached prefix), `row` gets a page
        of its own in its place, and the caller copies what is in it (`KVPool.copy`) before the step writes.

        Returns:
            The copies; empty where nothing was shared.

        Raises:
            InvalidInputError: `tokens` is negative or no whole number, or `row` would be longer than `max_tokens`.
            OutOfPagesError: a group has too few free pages; nothing was taken in any.
        """
        found = self._row(row)
        if type(tokens) is not int:  # most are, for every row of every step
            tokens = whole("tokens", tokens)
        if 0 < tokens <= len(found.pages[0]) * self.page_size - found.length and not self._shares_last(found):
            # In the last page, as most decode steps are.
            self._check_room(row, found.length + tokens)
            found.length += tokens
            return []
        copies = self._grow([(row, found, tokens)])
        found.length += tokens
        return copies

    def extend_all(
        self,
        rows: Sequence[int],
        tokens: int | Sequence[int],
        make_room: Callable[[Sequence[int]], object] | None = None,
    ) -> list[PageCopy]:
        """`extend` many rows in one call: all of them, or none.

        Args:
            rows: each once. tokens: how many more of each row, or of every row.
            make_room: is called where pages are lacking, with how many of each group, and may free some that no row
                has (`PrefixCache.make_room`, for example).

        Returns:
            The copies, of all rows.

        Raises:
            InvalidInputError: a row comes twice, or not as many numbers as rows. Others: as `extend`; the pages that
                `OutOfPagesError` speaks of are those of all rows.
        """
        counts = [tokens] * len(rows) if isinstance(tokens, int) else list(tokens)
        if len(counts) != len(rows) or len(set(rows)) != len(rows):
            raise InvalidInputError(
                f"rows {list(rows)} get {counts} tokens more: each row comes once, with one number of tokens"
            )
        if set(map(type, counts)) - {int}:
            counts = [whole("tokens", count) for count in counts]
        found = self._all(rows)
        ends = [one.length + count for one, count in zip(found, counts, strict=True)]
        if counts and (min(counts) < 0 or max(ends) > self.max_tokens):
            for row, one, count in zip(rows, found, counts, strict=True):
                self._new_pages(row, one, count)  # refuses one of them
        size, few = self.page_size, list(zip(rows, found, counts, strict=True))
        if not self._share_last(found):
            few = [one for one, end in zip(few, ends, strict=True) if end > len(one[1].pages[0]) * size]
        copies = self._grow(few, make_room)
        for one, end in zip(found, ends, strict=True):
            one.length = end
        return copies

    def _grow(
        self, rows: Sequence[tuple[int, _Row, int]], make_room: Callable[[Sequence[int]], object] | None = None
    ) -> list[PageCopy]:
        """Pages for so many tokens more of rows, and copies of those that others hold; all or none. How long the rows
        are then is the caller's to say."""
        left: Counter[tuple[int, int]] = Counter()
        new = [
            (pages, [self._copied(found, group, tokens, left) for group in range(len(self.windows))])
            for row, found, tokens in rows
            for pages in (self._new_pages(row, found, tokens),)
        ]
        wanted = [sum(pages + copies[group] for pages, copies in new) for group in range(len(self.windows))]
        if not any(wanted):
            return []
        if make_room is not None:
            lacking = [max(count - a.free, 0) for count, a in zip(wanted, self.allocators, strict=True)]
            if any(lacking):
                make_room(lacking)
        made: list[PageCopy] = []
        for group, given in enumerate(map(iter, allocate_all(self.allocators, wanted))):
            for (row, found, _), (count, copies) in zip(rows, new, strict=True):
                pages = found.pages[group]
                start = len(pages)
                if copies[group]:
                    start -= 1
                    source, target = pages.pop(), next(given)
                    self.allocators[group].release([source])
                    made.append(PageCopy(group, source, target))
                    pages.append(target)
                pages.extend(islice(given, count))
                self._change(row, group, start, len(pages))
        return made

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens of `row` from `length` on, such as drafts that were not accepted. What is kept by request
        does not follow: `states.commit` says after which draft it goes on.

        Raises:
            InvalidInputError: `row` has fewer tokens, `slide` gave back pages that a query at `length` sees, or
                `length` is no whole number.
        """
        found, length = self._row(row), whole("length", length)
        if not 0 <= length <= found.length:
            raise InvalidInputError(f"row {row} has {found.length} tokens and cannot be cut to {length}")
        kept = -(-length // self.page_size)
        for group, window in enumerate(self.windows):
            if first_visible_page(length, window, self.page_size) < min(found.first[group], kept):
                raise InvalidInputError(
                    f"row {row} cannot be cut to {length} tokens: group {group} has given back its first "
                    f"{found.first[group]} pages of {self.page_size}, and a window of {window} earlier keys reaches "
                    "into them; remove the row and run the request anew"
                )
        for group, pages in enumerate(found.pages):
            self.allocators[group].release(held(pages[kept:]))
            self._change(row, group, kept, len(pages))
            del pages[kept:]
            found.first[group] = min(found.first[group], kept)
        found.length = length

    def slide(self, row: int) -> None:
        """Give back the pages of `row` that no query at position `length(row)` or later sees; their entries become 0.

        Call it between steps, when every token of `row` is there to stay: the queries of a step that was planned still
        see them, and drafts that may be cut off reach further back.
        """
        found = self._row(row)
        for group, window in enumerate(self.windows):
            first = found.first[group]
            end = first_visible_page(found.length, window, self.page_size)
            if end > first:
                pages = found.pages[group]
                self.allocators[group].release(pages[first:end])
                pages[first:end] = [0] * (end - first)
                found.first[group] = end
                self._change(row, group, first, end)

    def slide_all(self, rows: Iterable[int]) -> None:
        """`slide` of many rows."""
        if any(window >= 0 for window in self.windows):
            for row in rows:
                self.slide(row)

    def fork(self, row: int) -> int:
        """A new row with the same tokens, which shares every page of `row`. The one that writes first into the last
        page gets a copy of it (`extend`).

        Raises:
            InvalidInputError: every row is in use.
        """
        found = self._row(row)
        self._check_free()
        if self.states is not None:
            self.states.fork(row, self._free[-1])
        new = self._begin(self._free[-1])
        share_all(self.allocators, found.pages)
        fork = self._rows[new]
        fork.length, fork.first, fork.pages = found.length, list(found.first), [list(p) for p in found.pages]
        for group, pages in enumerate(fork.pages):
            self._change(new, group, 0, len(pages))
        return new

    def adopt(self, row: int, match: Match) -> None:
        """Begin `row` with the pages of a cached prefix. It holds them itself from then on: the match may be released,
        or kept so that the prefix is not evicted while `row` runs.

        Raises:
            InvalidInputError: `row` has tokens; the match was released, has other groups, or is too long.
        """
        found = self._row(row)
        if found.length:
            raise InvalidInputError(f"row {row} has {found.length} tokens: only an empty row can begin with a prefix")
        if self.states is not None and match.length:
            raise InvalidInputError(
                f"row {row} cannot begin with {match.length} cached tokens: some layers keep a state by request, and "
                f"none was cached with the pages. Run the prompt anew, without a prefix cache"
            )
        if match.released:
            raise InvalidInputError("the match was released, so its pages may hold other tokens by now: match again")
        if len(match.pages) != len(self.windows) or not all(map(self._fits, self.windows, match.pages, repeat(match))):
            raise InvalidInputError(
                f"a match of {match.length} tokens in {len(match.pages)} groups does not fit a table of "
                f"{len(self.windows)} groups and pages of {self.page_size}, with windows {list(self.windows)}: build "
                "both with the same"
            )
        self._check_room(row, match.length)
        share_all(self.allocators, match.pages)
        found.length, found.pages = match.length, [list(pages) for pages in match.pages]
        for group, window in enumerate(self.windows):
            found.first[group] = first_visible_page(match.length, window, self.page_size)
            self._change(row, group, 0, len(found.pages[group]))

    def _fits(self, window: int, pages: Sequence[int], match: Match) -> bool:
        """Return whether a match has a page for every page of tokens that `window` sees, and for no other."""
        first = first_visible_page(match.length, window, self.page_size)
        return len(pages) * self.page_size == match.length and 0 not in pages[first:] and not any(pages[:first])

    def flush(self) -> None:
        """Bring what changed since the last flush to the device: one copy of the changed entries, in the order of the
        current stream, without waiting for the device."""
        if not any(self._changed):
            return
        where, values, ends = array("q"), array("i"), []
        for group, changed in enumerate(self._changed):
            for row, spans in changed.items():
                pages = self._rows[row].pages[group] if row in self._rows else []
                for start, stop in spans:
                    where.extend(range(row * self._columns + start, row * self._columns + stop))
                    values.extend(pages[start:stop])
                    values.extend(repeat(0, len(where) - len(values)))
            changed.clear()
            ends.append(len(where))
        device = self.tables[0].device
        staged = torch.frombuffer(bytearray().join((where, values)), dtype=torch.uint8)
        if device.type == "cuda":
            # Pinned anew for each flush: the allocator of pinned memory gives it to nobody before the copy has read it,
            # whereas a mirror that is kept would be written by the next flush while the device still reads.
            staged = staged.pin_memory()
        staged = staged.to(device, non_blocking=device.type == "cuda")
        index, entries = staged[: 8 * len(where)].view(torch.int64), staged[8 * len(where) :].view(torch.int32)
        if len(self.tables) == 1:
            self.tables[0].view(-1).index_copy_(0, index, entries)
            return
        for table, start, stop in zip(self.tables, [0, *ends], ends, strict=False):
            table.view(-1).index_copy_(0, index[start:stop], entries[start:stop])

    def check(self) -> None:
        """Prove that the rows are in order and, where nothing waits for a flush, that the tables on the device say the
        same (this waits for the device). `check_pages` proves the counts.

        Raises:
            InternalError: names the row, the group and the rule that is broken.
        """
        if self.states is not None and set(self.states.live) != set(self._rows):
            raise InternalError(f"rows {sorted(self._rows)} are in use, and the states of rows {self.states.live}")
        for row, found in self._rows.items():
            if row in self._free:
                raise InternalError(f"row {row} is free and in use")
            for group, pages in enumerate(found.pages):
                self._check_row(f"row {row}, group {group}", found.length, pages, found.first[group], group)
        if len(self._rows) + len(set(self._free)) != self.tables[0].shape[0]:
            raise InternalError(f"{len(self._rows)} rows in use and {len(set(self._free))} free are not all rows")
        for group, table in enumerate(self.tables):
            if not self._changed[group]:
                self._check_table(group, table.tolist())

    def _check_row(self, where: str, length: int, pages: list[int], first: int, group: int) -> None:
        if len(pages) != -(-length // self.page_size):
            raise InternalError(f"{where}: {len(pages)} pages of {self.page_size} for {length} tokens")
        if any(pages[:first]) or 0 in pages[first:]:
            raise InternalError(f"{where}: exactly the first {first} pages are given back, and the entries are {pages}")
        if first > first_visible_page(length, self.windows[group], self.page_size):
            raise InternalError(f"{where}: {first} pages are given back, and the next query sees some of them")
        free = [page for page in pages[first:] if not self.allocators[group].references(page)]
        if free:
            raise InternalError(f"{where}: page {free[0]} is in its table and free")

    def _check_table(self, group: int, table: list[list[int]]) -> None:
        for row, entries in enumerate(table):
            pages = self._rows[row].pages[group] if row in self._rows else []
            if entries != pages + [0] * (self._columns - len(pages)):
                raise InternalError(f"row {row}, group {group}: the table on the device is not the one on the host")

    def _row(self, row: int) -> _Row:
        try:
            return self._rows[row]
        except (KeyError, TypeError):
            raise self._no_request(row) from None

    def _all(self, rows: Iterable[int]) -> list[_Row]:
        known = self._rows
        try:
            return [known[row] for row in rows]
        except KeyError as exc:
            raise self._no_request(exc.args[0]) from None

    def _no_request(self, row: object) -> InvalidInputError:
        return InvalidInputError(f"row {row} is no request: rows in use are {sorted(self._rows)}")

    def _check_room(self, row: int, length: int) -> None:
        if length > self.max_tokens:
            raise InvalidInputError(
                f"row {row} would have {length} tokens and the table has room for {self.max_tokens}: refuse the "
                "request, or build the table for more"
            )

    def _new_pages(self, row: int, found: _Row, tokens: int) -> int:
        """Pages that a row lacks for so many tokens more, the same in every group."""
        if tokens < 0:
            raise InvalidInputError(f"row {row} cannot get {tokens} tokens more; truncate() takes some away")
        self._check_room(row, found.length + tokens)
        return -(-(found.length + tokens) // self.page_size) - len(found.pages[0])

    def _shares_last(self, found: _Row) -> bool:
        """Return whether others hold the last page too, in some group."""
        for allocator, pages in zip(self.allocators, found.pages, strict=True):
            if pages and allocator.references(pages[-1]) > 1:
                return True
        return False

    def _share_last(self, rows: Sequence[_Row]) -> bool:
        """Return whether others hold a page that some row would go on in."""
        size = self.page_size
        for group, allocator in enumerate(self.allocators):
            if max(allocator.holders([one.pages[group][-1] for one in rows if one.length % size]), default=0) > 1:
                return True
        return False

    def _copied(self, found: _Row, group: int, tokens: int, left: Counter[tuple[int, int]]) -> bool:
        """Return whether the next token goes into a page that others hold too.

        Args:
            left: (page, group) -> how many of those are to get a copy already; it is counted on.
        """
        if not tokens or not found.length % self.page_size:
            return False
        page = found.pages[group][-1]
        if self.allocators[group].references(page) - left[page, group] < 2:
            return False
        left[page, group] += 1
        return True

    def _change(self, row: int, group: int, start: int, stop: int) -> None:
        """Note entries for the next flush. Those that touch become one, so that the notes stay few without one."""
        if start >= stop:
            return
        _note(self._changed[group], row, start, stop)
        if group in self._copies:
            _note(self._copies[group].changed, row, start, stop)


def _note(changed: _Changes, row: int, start: int, stop: int) -> None:
    spans = changed.setdefault(row, [])
    apart = []
    for low, high in spans:
        if high < start or low > stop:
            apart.append((low, high))
        else:
            start, stop = min(start, low), max(stop, high)
    spans[:] = [*apart, (start, stop)]
