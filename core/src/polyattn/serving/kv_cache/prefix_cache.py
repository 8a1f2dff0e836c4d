"""Pages of tokens that were computed before, found again by the tokens: a radix tree whose edges are whole pages.

Only whole pages are shared: with pages of 64, a prompt of 32 tokens finds nothing and one of 65 finds 64. Pages of one
token make it exact to the token.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from numbers import Integral

from ...errors import InternalError, InvalidInputError
from .pages import PageAllocator, check_geometry, first_visible_page, held, release_all, share_all

__all__ = ["Match", "PrefixCache", "check_namespace"]


class _Node:
    """A run of pages without a branch: their tokens, and per group the page of each, 0 where it was given back, as at
    least the `first` ones of the group were."""

    __slots__ = ("children", "first", "locks", "namespace", "pages", "parent", "tokens")

    def __init__(
        self, tokens: list[int], pages: list[list[int]], parent: _Node | None, namespace: Hashable = None
    ) -> None:
        self.tokens, self.pages, self.parent, self.namespace = tokens, pages, parent, namespace
        self.children: dict[tuple[int, ...], _Node] = {}
        self.first = [0] * len(pages)
        # Matches that were not released and end in this node or below it.
        self.locks = 0


@dataclasses.dataclass(eq=False)
class Match:
    """A cached prefix, which is not evicted until it is released.

    Attributes:
        length: tokens, a multiple of the page size. pages: for each group the page of each page_size tokens, 0 before
            what the group's window still sees. released: whether it was.
    """

    length: int
    pages: tuple[list[int], ...]
    node: _Node = dataclasses.field(repr=False)
    released: bool = False


class PrefixCache:
    """Prefixes in pages of KV, shared between requests and evicted by least recent use.

    The cache is one more holder of its pages (`PageAllocator.share`): a page lives while the cache or any request has
    it. A call costs time in proportion to the pages of the tokens it is given, whatever else is cached; `evict` in
    proportion to the pages it frees and to what it passes over because it is in use.

    Args:
        page_size: tokens per page.
        windows: for each group the number of earlier keys that a query sees, -1 for full attention.
        allocators: of each group.

    Raises:
        InvalidInputError: `page_size` is under 1, or windows and allocators do not pair up.
    """

    def __init__(self, page_size: int, windows: Sequence[int], allocators: Sequence[PageAllocator]) -> None:
        check_geometry(page_size, windows, allocators)
        self.page_size = page_size
        self.windows, self.allocators = tuple(windows), tuple(allocators)
        self._roots: dict[Hashable, _Node] = {}
        # Nodes that may be evicted, the one to go first in front. A node comes after those below it: each use moves
        # the nodes of its path to the end, the deepest first. So the front is a leaf.
        self._order: OrderedDict[_Node, None] = OrderedDict()
        self._size = self._locked = 0

    @property
    def size(self) -> int:
        """Pages of tokens that are cached. One counts once, whatever number of groups has it."""
        return self._size

    @property
    def evictable(self) -> int:
        """Count the pages that no match holds. `evict` leaves pages that a request has in its table as well, so an
        engine that counts on this keeps the match of each running request."""
        return self._size - self._locked

    def held(self, group: int) -> Iterable[int]:
        """The pages of `group` that are cached, one item for each place they are at (`check_pages`)."""
        for node in self._nodes():
            yield from held(node.pages[group])

    def match(self, tokens: Sequence[int], *, namespace: Hashable = None) -> Match:
        """The longest cached prefix of a prompt, in whole pages.

        It never covers the whole prompt: at least one token is left to run, since a prompt without queries gives no
        logits. Where a sliding group has given pages back, the prefix ends where the group still has the last window
        of it. The prefix is not evicted until `release`.

        Args:
            tokens: token ids of the prompt, all of them.
            namespace: what else the KV depends on, such as an adapter's name, an image's hash or a tenant.

        Raises:
            InvalidInputError: the token ids are no whole numbers, or the namespace cannot be looked up.
        """
        check_namespace(namespace)
        tokens = _ids(tokens)
        path, count = self._walk(namespace, tokens, max(len(tokens) - 1, 0) // self.page_size)
        pages = [list(chain.from_iterable(node.pages[group] for node in path)) for group in range(len(self.windows))]
        count = self._usable(pages, count)
        path = self._cut(path, count)
        node = path[-1] if path else _Node([], [], None, namespace)
        for group, window in enumerate(self.windows):
            start = first_visible_page(count * self.page_size, window, self.page_size)
            pages[group][count:] = []
            pages[group][:start] = [0] * start
        for locked in path:
            if not locked.locks:
                del self._order[locked]
                self._locked += self._length(locked)
            locked.locks += 1
        return Match(count * self.page_size, tuple(pages), node)

    def release(self, match: Match) -> None:
        """Let the pages of `match` be evicted again.

        Raises:
            InvalidInputError: it was released already.
        """
        if match.released:
            raise InvalidInputError(f"a match of {match.length} tokens is released a second time: release it once")
        match.released = True
        for node in self._upwards(match.node):
            node.locks -= 1
            if not node.locks:
                self._order[node] = None
                self._locked -= self._length(node)

    def insert(self, tokens: Sequence[int], pages: Sequence[Sequence[int]], *, namespace: Hashable = None) -> int:
        """Remember the pages of computed tokens. Those of a last page that is not full are left out.

        The cache holds the pages that are new to it; of tokens that are cached already it keeps the pages it has. A
        sliding group's pages that were given back are 0; where the cache lacks one that is given here, it takes it.

        Args:
            tokens: token ids, in order from the first.
            pages: for each group the page of each `page_size` tokens; more are not looked at.
            namespace: as in `match`.

        Returns:
            How many of the tokens were cached already.

        Raises:
            InvalidInputError: a group has too few pages, a page is free, one of full attention is 0, the token ids
                are no whole numbers, or the namespace cannot be looked up.
        """
        check_namespace(namespace)
        tokens = _ids(tokens)
        count = len(tokens) // self.page_size
        self._check_pages(pages, count)
        path, known = self._walk(namespace, tokens, count)
        new = [list(given[known:count]) for given in pages]
        healed = self._missing(path, known, pages)
        share_all(self.allocators, new)
        try:
            share_all(self.allocators, [[page for _, _, page in group] for group in healed])
        except InvalidInputError:
            release_all(self.allocators, new)
            raise
        for group, places in enumerate(healed):
            for node, index, page in places:
                node.pages[group][index] = page
                node.first[group] = min(node.first[group], index)
        path = self._cut(path, known)
        if known < count:
            parent = path[-1] if path else self._roots.setdefault(namespace, _Node([], [], None, namespace))
            leaf = _Node(tokens[known * self.page_size : count * self.page_size], new, parent)
            parent.children[self._key(leaf.tokens)] = leaf
            self._order[leaf] = None
            self._size += count - known
            path.append(leaf)
        for node in reversed(path):
            if not node.locks:
                self._order.move_to_end(node)
        return known * self.page_size

    def evict(self, pages: int, group: int | None = None) -> int:
        """Free `pages` pages, the least recently used first; fewer where there are no more.

        A prefix is forgotten from its end, page by page. Pages that a match or a request still holds stay. With a
        sliding `group` only its pages go, from the beginning of a prefix on: what is left is still found where it ends
        in a whole window.

        Args:
            pages: how many are needed, such as `OutOfPagesError.wanted` - `free`.
            group: of which; None counts the pages of all groups.

        Returns:
            Pages that are free now and were not before, of `group`.

        Raises:
            InvalidInputError: there is no such group.
        """
        if group is not None and not 0 <= group < len(self.windows):
            raise InvalidInputError(f"group {group}: there are groups 0 to {len(self.windows) - 1}, and None for all")
        if group is not None and self.windows[group] >= 0:
            return self._evict_sliding(pages, group)
        freed, passed = 0, []
        while freed < pages and self._order:
            node = next(iter(self._order))
            freed += self._shorten(node, pages - freed, group)
            if node.tokens and freed < pages:
                # In use by a request, or above such a node.
                passed.append(node)
                del self._order[node]
        for node in reversed(passed):
            self._order[node] = None
            self._order.move_to_end(node, last=False)
        for sliding, window in enumerate(self.windows):
            if group is None and window >= 0 and freed < pages:
                freed += self._evict_sliding(pages - freed, sliding)
        return freed

    def clear(self) -> None:
        """Forget everything, as when the weights of a model change.

        Raises:
            InvalidInputError: there are matches that were not released.
        """
        if self._locked:
            raise InvalidInputError(f"{self._locked} pages are held by matches: release these before clear()")
        for node in self._nodes():
            release_all(self.allocators, node.pages)
        self._roots.clear()
        self._order.clear()
        self._size = 0

    def check(self) -> None:
        """Prove that the tree is in order. `check_pages` proves the counts of the pages.

        Raises:
            InternalError: names the rule that is broken.
        """
        size = locked = 0
        place = {node: index for index, node in enumerate(self._order)}
        nodes = list(self._nodes())
        for node in nodes:
            self._check_node(node, place)
            size += self._length(node)
            locked += self._length(node) if node.locks else 0
        if len(place) != sum(not node.locks for node in nodes):
            raise InternalError(f"{len(place)} nodes are in the order of eviction, and not all of them in the tree")
        empty = [namespace for namespace, root in self._roots.items() if not root.children]
        if empty:
            raise InternalError(f"namespace {empty[0]!r} is empty and not forgotten")
        if (size, locked) != (self._size, self._locked):
            raise InternalError(
                f"{size} pages are cached, {locked} of them locked; counted are {self._size} and {self._locked}"
            )

    def _check_node(self, node: _Node, place: dict[_Node, int]) -> None:
        where = f"node of {len(node.tokens)} tokens from {node.tokens[: self.page_size]}"
        count = self._length(node)
        if not count or len(node.tokens) % self.page_size or any(len(pages) != count for pages in node.pages):
            raise InternalError(f"{where}: pages of {self.page_size} are {[len(pages) for pages in node.pages]}")
        if node.parent is None or node.parent.children.get(self._key(node.tokens)) is not node:
            raise InternalError(f"{where}: its parent does not find it")
        if node.locks < sum(child.locks for child in node.children.values()):
            raise InternalError(f"{where}: {node.locks} matches hold it, and more hold what is below it")
        if (node in place) == (node.locks > 0):
            raise InternalError(f"{where}: held by {node.locks} matches and {'' if node in place else 'not '}evictable")
        if any(place.get(child, -1) > place.get(node, len(place)) for child in node.children.values()):
            raise InternalError(f"{where}: it would be evicted before what is below it")
        for group, pages in enumerate(node.pages):
            if any(pages[: node.first[group]]):
                raise InternalError(
                    f"{where}: of group {group} the first {node.first[group]} pages are given back and there"
                )
            if self.windows[group] < 0 and 0 in pages:
                raise InternalError(f"{where}: a page of group {group} is missing, which has full attention")
            free = [page for page in held(pages) if not self.allocators[group].references(page)]
            if free:
                raise InternalError(f"{where}: page {free[0]} of group {group} is cached and free")

    def _length(self, node: _Node) -> int:
        """Return the length in pages."""
        return len(node.tokens) // self.page_size

    def _key(self, tokens: list[int], at: int = 0) -> tuple[int, ...]:
        """Return the key of the page that begins at `at`."""
        return tuple(tokens[at : at + self.page_size])

    def _nodes(self) -> Iterator[_Node]:
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node.parent is not None:
                yield node

    @staticmethod
    def _upwards(node: _Node) -> Iterator[_Node]:
        while node.parent is not None:
            yield node
            node = node.parent

    def _walk(self, namespace: Hashable, tokens: list[int], count: int) -> tuple[list[_Node], int]:
        """The nodes that share a beginning with the first `count` pages of `tokens`, and how many pages they share; the
        last node may go on differently."""
        node, path = self._roots.get(namespace), []
        at, end = 0, count * self.page_size
        while node is not None and at < end:
            node = node.children.get(self._key(tokens, at))
            if node is None:
                break
            path.append(node)
            same = self._common(node.tokens, tokens[at : min(at + len(node.tokens), end)])
            at += same
            if same < len(node.tokens):
                break
        return path, at // self.page_size

    def _common(self, known: list[int], given: list[int]) -> int:
        """Tokens of the whole pages that both begin with; `given` is the shorter one."""
        if known[: len(given)] == given:
            return len(given)
        differs = next(index for index, (a, b) in enumerate(zip(known, given, strict=False)) if a != b)
        return differs // self.page_size * self.page_size

    def _usable(self, pages: Sequence[Sequence[int]], count: int) -> int:
        """The most of `count` pages whose last window is there in every group."""
        sliding = [
            (window, [i for i, page in enumerate(pages[g]) if not page]) for g, window in enumerate(self.windows)
        ]
        checked = 0
        while checked < len(sliding):
            window, gone = sliding[checked]
            while gone and gone[-1] >= count:
                gone.pop()
            checked += 1
            if gone and gone[-1] >= first_visible_page(count * self.page_size, window, self.page_size):
                # Ends that are later and still short of `count` see the same page.
                count, checked = gone[-1], 0
        return count

    def _cut(self, path: Sequence[_Node], count: int) -> list[_Node]:
        """The nodes of the first `count` pages of `path`; the one in which these end is split."""
        kept: list[_Node] = []
        for node in path:
            length = self._length(node)
            if count <= 0:
                break
            kept.append(node if length <= count else self._split(node, count))
            count -= length
        return kept

    def _split(self, node: _Node, count: int) -> _Node:
        """Make the first `count` pages of `node` a node of their own, above it. The caller uses or locks it next."""
        end = count * self.page_size
        upper = _Node(node.tokens[:end], [pages[:count] for pages in node.pages], node.parent)
        upper.locks, upper.first = node.locks, [min(first, count) for first in node.first]
        node.first = [max(first - count, 0) for first in node.first]
        if node.parent is not None:
            node.parent.children[self._key(upper.tokens)] = upper
        node.tokens, node.pages, node.parent = node.tokens[end:], [pages[count:] for pages in node.pages], upper
        upper.children[self._key(node.tokens)] = node
        if not upper.locks:
            self._order[upper] = None
        return upper

    def _check_pages(self, pages: Sequence[Sequence[int]], count: int) -> None:
        if len(pages) != len(self.windows):
            raise InvalidInputError(f"pages of {len(pages)} groups are given; there are {len(self.windows)} groups")
        for group, (given, window) in enumerate(zip(pages, self.windows, strict=True)):
            if len(given) < count:
                raise InvalidInputError(
                    f"group {group} has {len(given)} pages of {self.page_size} for {count} whole ones: pass a page for "
                    "each, 0 where a sliding group gave it back"
                )
            if window < 0 and 0 in given[:count]:
                raise InvalidInputError(
                    f"page {list(given).index(0)} of group {group} is 0, and a group of full attention gives none back"
                )

    def _missing(
        self, path: Sequence[_Node], count: int, pages: Sequence[Sequence[int]]
    ) -> list[list[tuple[_Node, int, int]]]:
        """Return for each group the places in the first `count` pages of `path` that have no page and could have
        one."""
        found: list[list[tuple[_Node, int, int]]] = [[] for _ in pages]
        at = 0
        for node in path:
            for group, have in enumerate(node.pages):
                given = pages[group][at : min(at + len(have), count)]
                if 0 in have:
                    pairs = enumerate(zip(have, given, strict=False))
                    found[group].extend((node, i, new) for i, (old, new) in pairs if new and not old)
            at += self._length(node)
        return found

    def _shorten(self, node: _Node, wanted: int, group: int | None) -> int:
        """Forget pages from the end of a leaf until `wanted` are free, or one is in use; how many are free."""
        if node.children:
            return 0
        gone = freed = 0
        pages = zip(*(reversed(p) for p in node.pages), strict=True)
        holders = zip(*(a.holders(reversed(p)) for a, p in zip(self.allocators, node.pages, strict=True)), strict=True)
        for last, counts in zip(pages, holders, strict=True):
            if freed >= wanted or max(counts) > 1:
                break
            freed += len(last) - last.count(0) if group is None else int(last[group] > 0)
            gone += 1
        kept = self._length(node) - gone
        release_all(self.allocators, [p[kept:] for p in node.pages])
        if not kept:
            self._forget(node)
        del node.tokens[kept * self.page_size :]
        for p in node.pages:
            del p[kept:]
        self._size -= gone
        return freed

    def _forget(self, node: _Node) -> None:
        del self._order[node]
        parent = node.parent
        if parent is not None:
            del parent.children[self._key(node.tokens)]
            if parent.parent is None and not parent.children:
                del self._roots[parent.namespace]

    def _evict_sliding(self, wanted: int, group: int) -> int:
        allocator, freed = self.allocators[group], 0
        for node in self._order:
            if freed >= wanted:
                break
            pages, first = node.pages[group], node.first[group]
            alone = (i for i in range(first, len(pages)) if pages[i] and allocator.references(pages[i]) == 1)
            places = list(islice(alone, wanted - freed))
            allocator.release([pages[i] for i in places])
            for i in places:
                pages[i] = 0
            while first < len(pages) and not pages[first]:
                first += 1
            node.first[group] = first
            freed += len(places)
        return freed


def _ids(tokens: Sequence[int]) -> list[int]:
    """`tokens` to look up. A tensor's elements equal no others, so it would never be found."""
    ids = list(tokens)
    if ids and not isinstance(ids[0], Integral):
        raise InvalidInputError(f"token ids are of {type(ids[0])}; whole numbers are needed: pass tokens.tolist()")
    return ids


def check_namespace(namespace: Hashable) -> None:
    """
    Raises:
        InvalidInputError: `namespace` cannot be looked up.
    """
    try:
        hash(namespace)
    except TypeError as exc:
        raise InvalidInputError(
            f"namespace is a {type(namespace).__name__}, which cannot be looked up; give a string or a tuple"
        ) from exc
