"""Pages of a KV cache: which are free, and how often each is held.

A page is held by every request that has it in its table and by the prefix cache; each holder counts once. Host only,
no torch: an allocator knows numbers, the pool of its group has the tensors.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn, Protocol

from ...errors import InternalError, InvalidInputError, OutOfPagesError
from .allocating import allocating

__all__ = [
    "Holder",
    "PageAllocator",
    "allocate_all",
    "check_geometry",
    "check_pages",
    "first_visible_page",
    "held",
    "release_all",
    "share_all",
    "whole",
]


class PageAllocator:
    """The pages of one group of layers.

    Pages 0 to `reserved` - 1 are never given out: page 0 is the padding page, which rows that are no request read and
    write. Every call is all or nothing and costs time in proportion to the pages it names.

    Args:
        pages: how many the pool of the group has, the reserved ones included.
        reserved: how many of the first are never given out; 1 or more.

    Attributes:
        capacity: pages that can be given out at all, `pages` - `reserved`.
        returned: how often a page became free or spare because a holder that is no cache released it: while this stays,
            no more pages can be had than before.

    Raises:
        InvalidInputError: `reserved` is under 1, or leaves no page; one of the two is no whole number.
    """

    def __init__(self, pages: int, *, reserved: int = 1) -> None:
        pages, reserved = whole("pages", pages), whole("reserved", reserved)
        if reserved < 1:
            raise InvalidInputError(f"reserved={reserved}: page 0 is the padding page, so 1 or more are reserved")
        if pages <= reserved:
            raise InvalidInputError(
                f"pages={pages} leaves none to give out: {reserved} are reserved, so {reserved + 1} or more are needed"
            )
        self.capacity = pages - reserved
        self._reserved = reserved
        with allocating(f"an allocator of pages={pages} needs", "give it as many as the pool has"):
            self._references = [0] * pages
            # The page that was given back last is given out first: it is most likely still in a device's cache.
            self._free = list(range(pages - 1, reserved - 1, -1))
            # How often a cache holds each page.
            self._cached = [0] * pages
        self._spare = self.returned = 0
        self._told: dict[int, list[Callable[[], None]]] = {}

    def __repr__(self) -> str:
        return f"PageAllocator(capacity={self.capacity}, free={self.free})"

    @property
    def pages(self) -> int:
        """Pages of the pool that this allocator is for, the reserved ones included."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Pages that can be given out now."""
        return len(self._free)

    @property
    def spare(self) -> int:
        """Pages that a cache holds and nobody else: they can be had for the asking."""
        return self._spare

    def references(self, page: int) -> int:
        """How many hold `page`; 0 where it is free."""
        if not self._reserved <= page < len(self._references):
            last = len(self._references) - 1
            raise InvalidInputError(f"{self._what(page)}; pages {self._reserved} to {last} can be asked for")
        return self._references[page]

    def holders(self, pages: Iterable[int]) -> Iterator[int]:
        """`references` of many pages; a reserved one has none."""
        return map(self._references.__getitem__, pages)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each held once.

        Raises:
            OutOfPagesError: fewer are free; none is taken.
            InvalidInputError: `count` is negative, or no whole number.
        """
        count = whole("count", count)
        if count < 0:
            raise InvalidInputError(f"{count} pages cannot be allocated; 0 or more are asked for")
        if count > len(self._free):
            later = "evict cached prefixes, preempt a request or wait until one ends"
            raise OutOfPagesError(
                f"{count} pages are wanted and {self.free} of {self.capacity} are free: "
                + (later if count <= self.capacity else "that many never will be; refuse the request"),
                wanted=count,
                free=self.free,
                capacity=self.capacity,
            )
        if not count:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int], *, cached: bool = False) -> None:
        """Add a holder to each of `pages`.

        Args:
            cached: the holder is a cache, which gives its pages up when others need them (`spare`).

        Raises:
            InvalidInputError: one of them is free, or was never given out; none is shared.
        """
        references, marks, reserved, end = self._references, self._cached, self._reserved, len(self._references)
        spare = self._spare
        for done, page in enumerate(pages):
            if not reserved <= page < end or not references[page]:
                for earlier in pages[:done]:
                    references[earlier] -= 1
                self._refuse(page, "shared")
            if marks[page] and references[page] == 1:
                spare -= 1
            references[page] += 1
        self._spare = spare
        if cached:
            for page in pages:
                marks[page] += 1

    def release(self, pages: Sequence[int], *, cached: bool = False) -> None:
        """Remove a holder from each of `pages`; those that nobody holds any more are free. A page that is named twice
        loses two.

        Args:
            cached: the holder is a cache, as in `share`.

        Raises:
            InvalidInputError: one of them is held less often than it is named; none is released.
        """
        references, marks, reserved, end = self._references, self._cached, self._reserved, len(self._references)
        spare, alone = self._spare, []
        for done, page in enumerate(pages):
            if not reserved <= page < end or not references[page]:
                for earlier in pages[:done]:
                    references[earlier] += 1
                    marks[earlier] += cached
                if page not in pages[:done]:
                    self._refuse(page, "released")
                raise InvalidInputError(
                    f"page {page} is released {pages.count(page)} times at once and held {references[page]} times: "
                    "release what a holder has, once"
                )
            references[page] -= 1
            if marks[page]:
                marks[page] -= cached
                if not references[page]:
                    spare -= 1
                elif references[page] == 1 and marks[page]:
                    spare += 1
                    alone.append(page)
        self._spare = spare
        # A page named twice is to be free once.
        free = len(self._free)
        self._free.extend(dict.fromkeys(page for page in reversed(pages) if not references[page]))
        if not cached:
            self.returned += len(self._free) - free + len(alone)
        for page in alone:
            if references[page]:
                for call in self._told.pop(page, ()):
                    call()

    def tell(self, page: int, call: Callable[[], None]) -> None:
        """Call `call` once, when nobody holds `page` any more but the cache that asks."""
        self._told.setdefault(page, []).append(call)

    def check(self, held: Iterable[int] | None = None) -> None:
        """Prove that every page is either free or held, and nothing else.

        Args:
            held: the pages of all holders, one item for each time one is held; then the counts are proven too, so
                that a leak is found. See `check_pages`.

        Raises:
            InternalError: names the rule that is broken.
        """
        free = Counter(self._free)
        for page, times in free.items():
            if times > 1:
                raise InternalError(f"page {page} is {times} times among the free pages; once is right")
            if not self._reserved <= page < len(self._references):
                raise InternalError(f"page {page} is among the free pages, and was never one to give out")
        for page, count in enumerate(self._references):
            given_out = page >= self._reserved and page not in free
            if given_out != (count > 0) or count < 0:
                state = "given out" if given_out else "free" if page in free else "reserved"
                raise InternalError(f"page {page} is {state} and its count of holders is {count}")
        spare = [page for page, marks in enumerate(self._cached) if marks and self._references[page] == 1]
        if len(spare) != self._spare:
            raise InternalError(f"{self._spare} pages are counted that only a cache holds, and they are {spare}")
        if held is None:
            return
        found = Counter(held)
        for page, count in enumerate(self._references):
            if found[page] != count:
                raise InternalError(f"page {page} is held {found[page]} times and its count of holders is {count}")
        strange = [page for page in found if not 0 <= page < len(self._references)]
        if strange:
            raise InternalError(f"page {min(strange)} is held and no such page exists")

    def _refuse(self, page: int, verb: str) -> NoReturn:
        raise InvalidInputError(f"{self._what(page)}, so it cannot be {verb}: name pages that are held")

    def _what(self, page: int) -> str:
        if 0 <= page < self._reserved:
            return f"page {page} is reserved"
        return f"page {page} is free" if 0 <= page < len(self._references) else f"page {page} does not exist"


class Holder(Protocol):
    """Describes an object that holds pages: a request table, a prefix cache, an engine with pages of its own."""

    def held(self, group: int) -> Iterable[int]:
        """The pages of `group` that it holds, one item for each time it does."""
        ...


def check_pages(allocators: Sequence[PageAllocator], *holders: Holder) -> None:
    """Prove that nothing leaks: every page is free, or held exactly as often as the holders say.

    Args:
        allocators: one per group of layers.
        holders: all that hold pages of them.

    Raises:
        InternalError: names the page and both counts.
    """
    for allocator in set(allocators):
        groups = [group for group, other in enumerate(allocators) if other is allocator]
        allocator.check(chain.from_iterable(holder.held(group) for holder in holders for group in groups))


def allocate_all(allocators: Sequence[PageAllocator], counts: Sequence[int]) -> list[list[int]]:
    """`counts[group]` pages of each group, or none at all.

    Raises:
        OutOfPagesError: names the first group that has too few.
    """
    taken: list[list[int]] = []
    for group, (allocator, count) in enumerate(zip(allocators, counts, strict=True)):
        try:
            taken.append(allocator.allocate(count))
        except OutOfPagesError as exc:
            for earlier, pages in zip(allocators, taken, strict=False):
                earlier.release(pages)
            raise OutOfPagesError(f"group {group}: {exc}", exc.wanted, exc.free, exc.capacity, group) from exc
    return taken


def share_all(allocators: Sequence[PageAllocator], pages: Sequence[Sequence[int]], *, cached: bool = False) -> None:
    """Add a holder, a cache where `cached`, to `pages[group]` of each group, 0 left out; all or none.

    Raises:
        InvalidInputError: one of them is free.
    """
    for group, allocator in enumerate(allocators):
        try:
            allocator.share(held(pages[group]), cached=cached)
        except InvalidInputError:
            release_all(allocators[:group], pages, cached=cached)
            raise


def release_all(allocators: Sequence[PageAllocator], pages: Sequence[Sequence[int]], *, cached: bool = False) -> None:
    """Remove a holder, a cache where `cached`, from `pages[group]` of each group, 0 left out."""
    for allocator, given in zip(allocators, pages, strict=False):
        allocator.release(held(given), cached=cached)


def held(pages: Sequence[int]) -> Sequence[int]:
    """`pages` without the places of those that were given back."""
    return [page for page in pages if page] if 0 in pages else pages


def first_visible_page(length: int, window: int, page_size: int) -> int:
    """The first page that queries at positions `length` and later still see; those before it can be given back.

    Args:
        window: earlier keys that a query sees; -1 all of them.
    """
    return 0 if window < 0 else max(0, length - window) // page_size


def check_geometry(page_size: int, windows: Sequence[int], allocators: Sequence[PageAllocator]) -> None:
    """Check what a request table and a prefix cache are made of.

    Raises:
        InvalidInputError: `page_size` is under 1, a window is under -1, one of them is no whole number, or groups and
            allocators do not pair up.
    """
    if whole("page_size", page_size) < 1:
        raise InvalidInputError(f"page_size={page_size}: a page holds 1 token or more")
    if not windows or len(windows) != len(allocators):
        raise InvalidInputError(
            f"{len(windows)} windows and {len(allocators)} allocators: each group of layers has one of both, and there "
            "is one group or more"
        )
    wrong = [window for window in windows if whole("window", window) < -1]
    if wrong:
        raise InvalidInputError(f"window {wrong[0]}: it is the number of earlier keys a query sees, or -1 for all")


def whole(name: str, number: Any) -> int:
    """`number` as an int, of whatever kind it is.

    Raises:
        InvalidInputError: it is no whole number.
    """
    try:
        return operator.index(number)
    except TypeError as exc:
        raise InvalidInputError(f"{name}={number!r} is a {type(number).__name__}; a whole number is needed") from exc
