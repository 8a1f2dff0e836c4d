"""A world of requests over real allocators, tables and prefix caches, whose pages have contents that can be told apart.

What a token leaves in its slot depends on all tokens before it and on the namespace, as keys and values do. So a page
that is shared wrongly, copied too late or given away too early has the wrong contents for somebody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from polyattn.serving import Match, PageAllocator, PrefixCache, RequestTable, check_pages


@dataclasses.dataclass
class Request:
    """A running request: its tokens that have a slot, and what each of them left there."""

    namespace: Hashable
    match: Match | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    written: list[int] = dataclasses.field(default_factory=list)


def contents(namespace: Hashable, before: int | None, token: int) -> int:
    """What `token` leaves in its slot, after a token that left `before`."""
    return hash((namespace, before, token))


class World:
    """Allocators, a table and a cache of one geometry, and the pages' contents."""

    def __init__(
        self, page_size: int, windows: Sequence[int], pages: Sequence[int], *, rows: int = 8, max_tokens: int = 4096
    ) -> None:
        self.page_size, self.windows = page_size, tuple(windows)
        self.allocators = [PageAllocator(count) for count in pages]
        self.table = RequestTable(rows, max_tokens, page_size, windows, self.allocators)
        self.cache = PrefixCache(page_size, windows, self.allocators)
        self.pool = [[[0] * page_size for _ in range(count)] for count in pages]
        self.requests: dict[int, Request] = {}

    def add(self, prompt: Sequence[int], namespace: Hashable = None) -> int:
        """A row that begins with what is cached of `prompt`."""
        row = self.table.add()
        match = self.cache.match(prompt, namespace=namespace)
        self.table.adopt(row, match)
        request = Request(namespace, match)
        self.requests[row] = request
        self._note(request, prompt[: match.length])
        return row

    def write(self, row: int, tokens: Sequence[int]) -> None:
        """Extend, copy what is to be copied, and run the tokens."""
        request, start = self.requests[row], self.table.length(row)
        for copy in self.table.extend(row, len(tokens)):
            pages = self.pool[copy.group]
            pages[copy.target] = list(pages[copy.source])
        self._note(request, tokens)
        for group, pool in enumerate(self.pool):
            pages = self.table.pages(row, group)
            for position in range(start, len(request.tokens)):
                page, offset = divmod(position, self.page_size)
                assert pages[page], "a token without a slot"
                pool[pages[page]][offset] = request.written[position]

    def truncate(self, row: int, length: int) -> None:
        self.table.truncate(row, length)
        request = self.requests[row]
        del request.tokens[length:], request.written[length:]

    def fork(self, row: int) -> int:
        new = self.table.fork(row)
        old = self.requests[row]
        self.requests[new] = Request(old.namespace, None, list(old.tokens), list(old.written))
        return new

    def insert(self, row: int) -> int:
        request = self.requests[row]
        pages = [self.table.pages(row, group) for group in range(len(self.windows))]
        return self.cache.insert(request.tokens, pages, namespace=request.namespace)

    def unlock(self, row: int) -> None:
        request = self.requests[row]
        if request.match is not None:
            self.cache.release(request.match)
            request.match = None

    def remove(self, row: int) -> None:
        self.unlock(row)
        self.table.remove(row)
        del self.requests[row]

    def check(self) -> None:
        """Every page is accounted for, the tree and the rows are in order, and every query sees what it should."""
        self.table.flush()
        self.table.check()
        self.cache.check()
        check_pages(self.allocators, self.table, self.cache)
        for row, request in self.requests.items():
            assert self.table.length(row) == len(request.tokens)
            for group in range(len(self.windows)):
                pages = self.table.pages(row, group)
                (copy,) = self.table.first_pages([row], group, [len(pages)])
                assert copy.tolist() == pages, "the copy on the host follows every change"
                self._check_visible(pages, request.written, group)
            if request.match is not None and request.match.length <= len(request.written):
                for group, pages in enumerate(request.match.pages):
                    self._check_visible(pages, request.written[: request.match.length], group)

    def end(self) -> None:
        """Nothing leaks: without requests and cache every page is free."""
        for row in list(self.requests):
            self.remove(row)
        self.check()
        self.cache.clear()
        self.check()
        assert [a.free for a in self.allocators] == [a.capacity for a in self.allocators]
        assert self.cache.size == self.cache.evictable == 0

    def _check_visible(self, pages: Sequence[int], written: Sequence[int], group: int) -> None:
        window = self.windows[group]
        first = 0 if window < 0 else max(0, len(written) - window)
        for position in range(first, len(written)):
            page, offset = divmod(position, self.page_size)
            assert pages[page], f"group {group}: the page of token {position} is gone"
            assert self.pool[group][pages[page]][offset] == written[position], f"group {group}, token {position}"

    @staticmethod
    def _note(request: Request, tokens: Sequence[int]) -> None:
        for token in tokens:
            before = request.written[-1] if request.written else None
            request.written.append(contents(request.namespace, before, token))
            request.tokens.append(token)
