"""Pages of tokens that were computed before, found again by the tokens: a radix tree whose edges are whole pages.

Only whole pages are shared: with pages of 64, a prompt of 32 tokens finds nothing and one of 65 finds 64. Pages of one
token make it exact to the token.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from numbers import Integral
from typing import NamedTuple

from ...errors import InternalError, InvalidInputError
from .by_age import ByAge
from .pages import PageAllocator, check_geometry, first_visible_page, held, release_all, share_all

__all__ = ["Match", "PrefixCache", "check_namespace"]


class _Node:
    """A run of pages without a branch: their tokens, and per group the page of each, 0 where it was given back.

    Attributes:
        start: pages before it. used: when it was last; later than what is below it, unless a match holds it.
        waits: it is a leaf that ends in a page which others hold, and is told when they do not.
        seen: per sliding group, how many of its first pages were looked at: each of those is gone, or held by others
            and told of, or among `ready`. ready: per group, places from the beginning of the prefix, a heap.
    """

    __slots__ = (
        *("children", "locks", "namespace", "pages", "parent", "ready", "seen", "start", "tokens", "used", "waits"),
    )

    def __init__(
        self, tokens: list[int], pages: list[list[int]], parent: _Node | None, start: int, used: int,
        namespace: Hashable = None,
    ) -> None:  # fmt: skip
        self.tokens, self.pages, self.parent, self.namespace = tokens, pages, parent, namespace
        self.start, self.used, self.waits = start, used, False
        self.children: dict[tuple[int, ...], _Node] = {}
        self.seen = [0] * len(pages)
        self.ready: list[list[int]] = [[] for _ in pages]
        # Matches that were not released and end in this node or below it.
        self.locks = 0


class _Cut(NamedTuple):
    """What may go of a leaf: all but its first `kept` pages. `held`: others hold the last of those."""

    node: _Node
    kept: int
    held: bool


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
    proportion to the pages it frees, each O(log n) over time: what is in use is passed over once, and looked at again
    when its page comes free.

    Args:
        page_size: tokens per page.
        windows: for each group the number of earlier keys that a query sees, -1 for full attention.
        allocators: of each group.

    Attributes:
        inserted: pages that were new to the cache so far: while this stays, no match is longer than before.

    Raises:
        InvalidInputError: `page_size` is under 1, or windows and allocators do not pair up.
    """

    def __init__(self, page_size: int, windows: Sequence[int], allocators: Sequence[PageAllocator]) -> None:
        check_geometry(page_size, windows, allocators)
        self.page_size = page_size
        self.windows, self.allocators = tuple(windows), tuple(allocators)
        self._roots: dict[Hashable, _Node] = {}
        self._clock = itertools.count(1)
        # Leaves that may be shortened, and per sliding group the nodes that may have pages to give. What has become
        # something else meanwhile is dropped when it comes up, and offered again when it may go again.
        self._leaves: ByAge[_Node] = ByAge()
        self._sliding: dict[int, ByAge[_Node]] = {g: ByAge() for g, window in enumerate(self.windows) if window >= 0}
        # A group that counts pages of tokens, where there is one: every token has one there.
        self._full = next((g for g, window in enumerate(self.windows) if window < 0), None)
        self._size = self._locked = self.inserted = 0

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
        node = path[-1] if path else self._root(namespace)
        for group, window in enumerate(self.windows):
            start = first_visible_page(count * self.page_size, window, self.page_size)
            pages[group][count:] = []
            pages[group][:start] = [0] * start
        for locked in path:
            if not locked.locks:
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
                node.used = next(self._clock)
                self._offer(node)
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
        share_all(self.allocators, new, cached=True)
        try:
            share_all(self.allocators, [[page for _, _, page in group] for group in healed], cached=True)
        except InvalidInputError:
            release_all(self.allocators, new, cached=True)
            raise
        for group, places in enumerate(healed):
            for node, index, page in places:
                node.pages[group][index] = page
                if index < node.seen[group]:
                    heapq.heappush(node.ready[group], node.start + index)
                self._offer(node)
            self.inserted += len(places)
        path = self._cut(path, known)
        if known < count:
            parent = path[-1] if path else self._roots.setdefault(namespace, self._root(namespace))
            leaf = _Node(tokens[known * self.page_size : count * self.page_size], new, parent, known, 0)
            parent.children[self._key(leaf.tokens)] = leaf
            self._size += count - known
            self.inserted += count - known
            path.append(leaf)
        for node in reversed(path):
            if not node.locks:
                node.used = next(self._clock)
        if known < count:
            self._offer(leaf)
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
        cuts, freed = self._cuts(pages, group)
        for cut in cuts:
            self._shorten(cut)
        for sliding in self._sliding:
            if group is None and freed < pages:
                freed += self._evict_sliding(pages - freed, sliding)
        return freed

    def make_room(self, pages: Sequence[int]) -> bool:
        """Free so many pages of each group, as `evict` does, or none of any: where there are not as many.

        Args:
            pages: for each group how many are needed, 0 or more.

        Returns:
            Whether they are free now.

        Raises:
            InvalidInputError: not as many numbers as groups.
        """
        if len(pages) != len(self.windows):
            raise InvalidInputError(f"room in {len(pages)} groups is asked for; there are {len(self.windows)} groups")
        if any(wanted > allocator.spare for wanted, allocator in zip(pages, self.allocators, strict=True)):
            return False
        full = max((wanted for wanted, window in zip(pages, self.windows, strict=True) if window < 0), default=0)
        cuts, found = self._cuts(full, self._full) if full else ([], 0)
        thinned = [(group, *self._thin(pages[group], group)) for group in self._sliding if pages[group] > 0]
        enough = found >= full and all(freed >= pages[group] for group, _, freed in thinned)
        for group, places, _ in thinned:
            (self._give if enough else self._keep)(places, group)
        for cut in cuts:
            if enough:
                self._shorten(cut)
            else:
                self._leaves.add(cut.node)
        return enough

    def clear(self) -> None:
        """Forget everything, as when the weights of a model change.

        Raises:
            InvalidInputError: there are matches that were not released.
        """
        if self._locked:
            raise InvalidInputError(f"{self._locked} pages are held by matches: release these before clear()")
        nodes = list(self._nodes())
        for queue in (self._leaves, *self._sliding.values()):
            queue.clear()
        self._roots.clear()
        for node in nodes:
            gone, node.pages = node.pages, [[] for _ in node.pages]
            node.tokens.clear()  # who is told of its pages finds nothing to do
            release_all(self.allocators, gone, cached=True)
        self._size = 0

    def check(self) -> None:
        """Prove that the tree is in order. `check_pages` proves the counts of the pages.

        Raises:
            InternalError: names the rule that is broken.
        """
        size = locked = 0
        for node in self._nodes():
            self._check_node(node)
            size += self._length(node)
            locked += self._length(node) if node.locks else 0
        empty = [namespace for namespace, root in self._roots.items() if not root.children]
        if empty:
            raise InternalError(f"namespace {empty[0]!r} is empty and not forgotten")
        if (size, locked) != (self._size, self._locked):
            raise InternalError(
                f"{size} pages are cached, {locked} of them locked; counted are {self._size} and {self._locked}"
            )

    def _check_node(self, node: _Node) -> None:
        where = f"node of {len(node.tokens)} tokens from {node.tokens[: self.page_size]}"
        count = self._length(node)
        if not count or len(node.tokens) % self.page_size or any(len(pages) != count for pages in node.pages):
            raise InternalError(f"{where}: pages of {self.page_size} are {[len(pages) for pages in node.pages]}")
        if node.parent is None or node.parent.children.get(self._key(node.tokens)) is not node:
            raise InternalError(f"{where}: its parent does not find it")
        if node.locks < sum(child.locks for child in node.children.values()):
            raise InternalError(f"{where}: {node.locks} matches hold it, and more hold what is below it")
        if not node.locks and any(child.used > node.used for child in node.children.values()):
            raise InternalError(f"{where}: it would be evicted before what is below it")
        last = [a.references(p[-1]) for a, p in zip(self.allocators, node.pages, strict=True) if p[-1]]
        if not (node.locks or node.children or node in self._leaves) and not (node.waits and max(last, default=0) > 1):
            raise InternalError(f"{where}: nothing of it can ever be evicted")
        for group, queue in self._sliding.items():
            self._check_sliding(where, node, group, queue)
        for group, pages in enumerate(node.pages):
            if self.windows[group] < 0 and 0 in pages:
                raise InternalError(f"{where}: a page of group {group} is missing, which has full attention")
            free = [page for page in held(pages) if not self.allocators[group].references(page)]
            if free:
                raise InternalError(f"{where}: page {free[0]} of group {group} is cached and free")

    def _check_sliding(self, where: str, node: _Node, group: int, queue: ByAge[_Node]) -> None:
        seen, ready, allocator = node.seen[group], node.ready[group], self.allocators[group]
        if not node.locks and node not in queue and (ready or seen < self._length(node)):
            raise InternalError(f"{where}: its pages of group {group} can never be evicted")
        for place, page in enumerate(node.pages[group][:seen]):
            if page and allocator.references(page) == 1 and node.start + place not in ready:
                raise InternalError(f"{where}: page {page} of group {group} is free to go, and nobody knows")

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
        end, middle = count * self.page_size, node.start + count
        upper = _Node(
            node.tokens[:end], [pages[:count] for pages in node.pages], node.parent, node.start, next(self._clock)
        )
        upper.locks = node.locks
        for group in self._sliding:
            ready = sorted(node.ready[group])
            upper.ready[group] = [place for place in ready if place < middle]
            node.ready[group] = [place for place in ready if place >= middle]
            upper.seen[group], node.seen[group] = min(node.seen[group], count), max(node.seen[group] - count, 0)
        if node.parent is not None:
            node.parent.children[self._key(upper.tokens)] = upper
        node.tokens, node.pages, node.parent = node.tokens[end:], [pages[count:] for pages in node.pages], upper
        node.start = middle
        upper.children[self._key(node.tokens)] = node
        if not upper.locks:
            self._offer(upper)
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

    def _root(self, namespace: Hashable) -> _Node:
        return _Node([], [], None, 0, 0, namespace)

    def _offer(self, node: _Node) -> None:
        """A node that no match holds may be evicted, as far as it is a leaf or has sliding pages."""
        if node.locks:
            return
        if not node.children and not node.waits:
            self._leaves.add(node)
        for group, queue in self._sliding.items():
            if node.ready[group] or node.seen[group] < self._length(node):
                queue.add(node)

    def _cuts(self, wanted: int, group: int | None) -> tuple[list[_Cut], int]:
        """What is to be cut off so that `wanted` pages come free, the least recently used first, and how many do. The
        leaves are out of the queue then: they are to be shortened, or put back."""
        cuts: list[_Cut] = []
        emptied: dict[_Node, int] = {}
        freed = 0
        while freed < wanted and (node := self._leaves.pop()) is not None:
            if node.locks or len(node.children) > emptied.get(node, 0):
                continue
            cut, more = self._cut_of(node, wanted - freed, group)
            freed += more
            if cut.kept == self._length(node):
                self._wait(node)
                continue
            cuts.append(cut)
            if not cut.kept and (parent := node.parent) is not None:
                emptied[parent] = emptied.get(parent, 0) + 1
                if parent.parent is not None and emptied[parent] == len(parent.children) and not parent.waits:
                    self._leaves.add(parent)
        return cuts, freed

    def _cut_of(self, node: _Node, wanted: int, group: int | None) -> tuple[_Cut, int]:
        """Pages from the end of a leaf until `wanted` are free, or others hold one; how many are free."""
        if group is not None:  # of full attention, so that each token's page counts one
            kept = max(self._length(node) - wanted, 0)
            if all(max(a.holders(p[kept:])) < 2 for a, p in zip(self.allocators, node.pages, strict=True)):
                return _Cut(node, kept, False), self._length(node) - kept
        freed = 0
        pages = zip(*(reversed(p) for p in node.pages), strict=True)
        holders = zip(*(a.holders(reversed(p)) for a, p in zip(self.allocators, node.pages, strict=True)), strict=True)
        for gone, (last, counts) in enumerate(zip(pages, holders, strict=True)):
            if freed >= wanted or max(counts) > 1:
                return _Cut(node, self._length(node) - gone, max(counts) > 1), freed
            freed += len(last) - last.count(0) if group is None else int(last[group] > 0)
        return _Cut(node, 0, False), freed

    def _shorten(self, cut: _Cut) -> None:
        """Forget the pages of a leaf that is out of the queue."""
        node, kept = cut.node, cut.kept
        gone = [pages[kept:] for pages in node.pages]
        self._size -= self._length(node) - kept
        if not kept:
            self._forget(node)
        del node.tokens[kept * self.page_size :]
        for group, pages in enumerate(node.pages):
            del pages[kept:]
            node.seen[group] = min(node.seen[group], kept)
        release_all(self.allocators, gone, cached=True)
        if kept and cut.held:
            self._wait(node)
        elif kept:
            self._leaves.add(node)

    def _wait(self, node: _Node) -> None:
        """A leaf ends in a page that others hold: it comes back when they do not."""
        last = ((allocator, pages[-1]) for allocator, pages in zip(self.allocators, node.pages, strict=True))
        allocator, page = next((a, page) for a, page in last if page and a.references(page) > 1)
        node.waits = True
        allocator.tell(page, functools.partial(self._waited, node))

    def _waited(self, node: _Node) -> None:
        node.waits = False
        if node.tokens:  # else it is forgotten
            self._offer(node)

    def _forget(self, node: _Node) -> None:
        parent = node.parent
        for queue in (self._leaves, *self._sliding.values()):
            queue.discard(node)
        if parent is None:
            return
        del parent.children[self._key(node.tokens)]
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            del self._roots[parent.namespace]

    # Sliding groups ---------------------------------------------------------------------------------------------------

    def _evict_sliding(self, wanted: int, group: int) -> int:
        places, freed = self._thin(wanted, group)
        self._give(places, group)
        return freed

    def _thin(self, wanted: int, group: int) -> tuple[list[tuple[_Node, list[int]]], int]:
        """Places of `wanted` sliding pages that nobody else holds, by node, the least recently used first, and how many
        they are. They are no longer among those that are known: they are to be given, or kept."""
        found: list[tuple[_Node, list[int]]] = []
        freed = 0
        while freed < wanted and (node := self._sliding[group].pop()) is not None:
            if node.locks:
                continue
            places = list(islice(self._alone(node, group), wanted - freed))
            freed += len(places)
            if places:
                found.append((node, places))
            self._offer(node)
        return found, freed

    def _alone(self, node: _Node, group: int) -> Iterator[int]:
        """Places of a node that nobody else holds, the first of them first; each is looked at once, and again when it
        is told of."""
        allocator, pages, ready = self.allocators[group], node.pages[group], node.ready[group]
        while ready or node.seen[group] < len(pages):
            if ready:
                place = heapq.heappop(ready) - node.start
            else:
                place, node.seen[group] = node.seen[group], node.seen[group] + 1
            page = pages[place] if place < len(pages) else 0
            if not page:
                continue
            if allocator.references(page) == 1:
                yield place
            else:
                allocator.tell(page, functools.partial(self._told, node, group, node.start + place, page))

    def _told(self, node: _Node, group: int, place: int, page: int) -> None:
        """Nobody else holds a page any more. The node it was in may have been split since, or be gone."""
        while place < node.start and node.parent is not None:
            node = node.parent
        at = place - node.start
        if at < self._length(node) and node.pages[group][at] == page:
            heapq.heappush(node.ready[group], place)
            self._offer(node)

    def _keep(self, thinned: Sequence[tuple[_Node, list[int]]], group: int) -> None:
        """Places that stay after all."""
        for node, places in thinned:
            for place in places:
                heapq.heappush(node.ready[group], node.start + place)
            self._offer(node)

    def _give(self, thinned: Sequence[tuple[_Node, list[int]]], group: int) -> None:
        for node, places in thinned:
            pages = node.pages[group]
            gone = [pages[place] for place in places]
            for place in places:
                pages[place] = 0
            self.allocators[group].release(gone, cached=True)
            if len(self._sliding) == len(self.windows):
                self._trim(node)

    def _trim(self, node: _Node) -> None:
        """Forget the end of a leaf that has no page in any group: nothing ends there any more."""
        while node.parent is not None and not node.children and not node.locks:
            parent, kept = node.parent, self._length(node)
            while kept and not any(pages[kept - 1] for pages in node.pages):
                kept -= 1
            if kept < self._length(node):
                self._shorten(_Cut(node, kept, False))
            if kept:
                return
            node = parent


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
