"""Prefixes in whole pages: what matches, what splits, what stays while it is used, what is evicted first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyattn.errors import InternalError, InvalidInputError
from polyattn.serving import PageAllocator, PrefixCache, check_pages


class Filled:
    """A cache and somebody who computes prompts, puts them in and goes away."""

    def __init__(self, page_size=1, windows=(-1,), pages=1000) -> None:
        self.page_size = page_size
        self.allocators = [PageAllocator(pages) for _ in windows]
        self.cache = PrefixCache(page_size, windows, self.allocators)
        self.used: list[list[int]] = [[] for _ in windows]

    def use(self, count):
        """Pages of each group that a request has, until `leave`."""
        self.used = [a.allocate(count) for a in self.allocators]
        return [list(pages) for pages in self.used]

    def leave(self):
        for allocator, pages in zip(self.allocators, self.used, strict=True):
            allocator.release(pages)
            pages.clear()

    def held(self, group):
        return self.used[group]

    def put(self, tokens, gone=(), namespace=None):
        """Insert `tokens`; the first `gone[g - 1]` pages of sliding group g are given back before. Returns the pages,
        and what `insert` does."""
        pages = [a.allocate(-(-len(tokens) // self.page_size)) for a in self.allocators]
        given = [pages[0], *([0] * n + p[n:] for n, p in zip(gone, pages[1:], strict=True))] if gone else pages
        known = self.cache.insert(tokens, given, namespace=namespace)
        for allocator, mine in zip(self.allocators, pages, strict=True):
            allocator.release(mine)
        self.check()
        return given, known

    def length(self, tokens, namespace=None):
        match = self.cache.match(tokens, namespace=namespace)
        self.check()
        self.cache.release(match)
        self.check()
        return match.length

    def check(self):
        self.cache.check()
        check_pages(self.allocators, self.cache, self)


def test_pages_of_64_match_whole_pages_only():
    filled = Filled(64)
    prompt = list(range(200))
    filled.put(prompt[:32])
    assert (filled.cache.size, filled.length(prompt[:32])) == (0, 0)
    filled.put(prompt[:65])
    assert filled.cache.size == 1
    assert {n: filled.length(prompt[:n]) for n in (32, 63, 64, 65, 128, 200)} == {
        32: 0,
        63: 0,
        64: 0,  # one token is left to run
        65: 64,
        128: 64,
        200: 64,
    }


def test_pages_of_one_match_to_the_token():
    filled = Filled(1)
    prompt = list(range(50))
    filled.put(prompt[:33])
    assert [filled.length(prompt[:n]) for n in (0, 1, 2, 32, 33, 34, 50)] == [0, 0, 1, 31, 32, 33, 33]
    assert filled.length([*prompt[:20], 999, 999]) == 20


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_match_never_covers_the_whole_prompt(page_size):
    filled = Filled(page_size)
    prompt = list(range(4 * page_size))
    filled.put(prompt)
    assert filled.length(prompt) == 3 * page_size if page_size > 1 else 3
    assert filled.length([*prompt, 1]) == 4 * page_size


def test_a_match_has_the_pages_that_were_put_in():
    filled = Filled(16)
    pages, known = filled.put(list(range(70)))
    assert known == 0
    match = filled.cache.match(list(range(70)))
    assert (match.length, match.pages) == (64, (pages[0][:4],))
    assert "node" not in repr(match)
    filled.cache.release(match)


def test_what_is_cached_already_keeps_its_pages():
    filled = Filled(16)
    first, _ = filled.put(list(range(48)))
    second, known = filled.put([*range(48), *range(500, 532)])
    assert known == 48
    match = filled.cache.match([*range(48), *range(500, 540)])
    assert match.pages == ([*first[0], *second[0][3:5]],)
    filled.cache.release(match)
    assert filled.put(list(range(32)))[1] == 32
    assert filled.cache.size == 5


def test_a_node_is_split_between_pages():
    filled = Filled(4)
    filled.put([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    _, known = filled.put([1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0])
    assert known == 4  # the second page differs in its third token
    assert filled.cache.size == 3 + 2
    assert filled.length([1, 2, 3, 4, 5, 6, 7, 8, 9, 9]) == 8
    assert filled.length([1, 2, 3, 4, 5, 6, 0, 0, 9]) == 8
    assert filled.length([1, 2, 3, 4, 5, 5, 5, 5, 9]) == 4
    assert filled.cache.size == 3 + 2


def test_namespaces_do_not_see_each_other():
    filled = Filled(4)
    prompt = list(range(9))
    filled.put(prompt, namespace="adapter a")
    assert filled.length(prompt, "adapter a") == 8
    assert filled.length(prompt, "adapter b") == filled.length(prompt) == 0
    assert filled.put(prompt, namespace=("adapter b", 7))[1] == 0
    assert filled.cache.size == 4
    filled.cache.evict(2)
    assert filled.length(prompt, "adapter a") == 0
    assert filled.length(prompt, ("adapter b", 7)) == 8
    assert list(filled.cache._roots) == [("adapter b", 7)], "an empty namespace costs nothing"


def test_the_least_recently_used_goes_first_from_its_end():
    filled = Filled(1)
    a, b = [1, 1, 1, 1], [2, 2, 2, 2]
    filled.put(a)
    filled.put(b)
    assert filled.length([*a, 0]) == 4  # used: b is the older one now
    assert filled.cache.evict(3) == 3
    assert [filled.length([*tokens, 0]) for tokens in (a, b)] == [4, 1]
    assert filled.cache.evict(2) == 2  # a was asked for before b was
    assert [filled.length([*tokens, 0]) for tokens in (a, b)] == [2, 1]
    assert filled.cache.evict(100) == 3
    assert (filled.cache.size, filled.cache.evict(1)) == (0, 0)


def test_a_stem_outlives_its_branches():
    filled = Filled(1)
    stem = [7, 7, 7]
    filled.put([*stem, 1, 1])
    filled.put([*stem, 2, 2])
    assert filled.cache.evict(2) == 2
    filled.check()
    assert [filled.length([*stem, n, n, 0]) for n in (1, 2)] == [3, 5]


def test_a_match_is_not_evicted_until_it_is_released():
    filled = Filled(1)
    filled.put([1, 2, 3, 4])
    filled.put([1, 2, 8, 9])
    one, two = filled.cache.match([1, 2, 3, 0]), filled.cache.match([1, 2, 3, 4, 0])
    assert (filled.cache.size, filled.cache.evictable) == (6, 2)
    assert filled.cache.evict(100) == 2
    filled.cache.release(two)
    assert filled.cache.evictable == 1
    assert filled.cache.evict(100) == 1
    filled.check()
    with pytest.raises(InvalidInputError, match="3 pages are held by matches: release these before clear"):
        filled.cache.clear()
    filled.cache.release(one)
    assert filled.cache.evict(100) == 3
    filled.check()
    assert filled.allocators[0].free == filled.allocators[0].capacity


def test_a_match_that_is_split_stays_held():
    filled = Filled(1)
    filled.put([1, 2, 3, 4])
    match = filled.cache.match([1, 2, 3, 4, 0])
    filled.put([1, 2, 9])
    assert filled.cache.evictable == 1
    assert filled.cache.evict(100) == 1
    filled.cache.release(match)
    filled.check()
    assert filled.cache.evictable == 4


def test_a_match_of_nothing_holds_nothing():
    filled = Filled(1)
    match = filled.cache.match([1, 2], namespace="nobody")
    assert (match.length, match.pages) == (0, ([],))
    filled.cache.clear()
    filled.cache.release(match)
    assert not filled.cache._roots


def test_a_match_is_released_once():
    filled = Filled(1)
    filled.put([1, 2, 3])
    match = filled.cache.match([1, 2, 3])
    filled.cache.release(match)
    with pytest.raises(InvalidInputError, match="a match of 2 tokens is released a second time"):
        filled.cache.release(match)
    filled.check()


def test_pages_of_a_running_request_are_left():
    filled = Filled(1)
    filled.cache.insert([1, 2, 3], filled.use(3))
    filled.put([1, 2, 3, 4, 5])
    assert filled.cache.evict(100) == 2
    assert (filled.cache.size, filled.cache.evict(1)) == (3, 0)
    filled.check()
    filled.put([6, 7])  # newer, and yet the first that can go
    assert filled.cache.evict(1) == 1
    filled.leave()
    assert filled.cache.evict(100) == 4
    filled.check()


def test_pages_that_were_passed_over_keep_their_turn():
    filled = Filled(1)
    filled.cache.insert([1, 2, 3], filled.use(3))
    filled.put([1, 2, 5, 6])
    filled.put([7, 8, 9])
    assert filled.cache.evict(3) == 3  # [1, 2, 3] is in use, so [5, 6] and 9 go
    filled.leave()
    filled.check()
    assert filled.cache.evict(3) == 3
    assert filled.length([7, 8, 0]) == 2


def test_clear_forgets_everything_and_requests_keep_theirs():
    filled = Filled(4)
    filled.cache.insert(list(range(8)), filled.use(2))
    filled.cache.clear()
    assert (filled.cache.size, filled.length(list(range(9)))) == (0, 0)
    assert filled.allocators[0].free == filled.allocators[0].capacity - 2


def test_a_prefix_ends_where_the_last_window_is_whole():
    filled = Filled(4, (-1, 6))
    tokens = list(range(24))
    given, _ = filled.put([*tokens, 0], gone=[3])  # pages 0 to 2 of group 1 are gone
    match = filled.cache.match([*tokens, 0])
    # Six earlier keys of position 24 are 18 to 23: pages 4 and 5.
    assert (match.length, match.pages) == (24, (given[0][:6], [0, 0, 0, 0, *given[1][4:6]]))
    filled.cache.release(match)
    # Position 20 sees 14 to 19, pages 3 and 4; position 16 sees 10 to 15 and page 2 is gone.
    assert filled.length(tokens[:21]) == 20
    assert filled.length(tokens[:17]) == 0
    assert filled.length([*tokens[:22], 99, 99, 99]) == 20


def test_what_one_request_gave_back_another_fills_in():
    filled = Filled(4, (-1, 6))
    tokens = list(range(24))
    filled.put(tokens, gone=[4])
    assert filled.length(tokens[:13]) == 0
    (_, second), known = filled.put(tokens[:16])
    assert known == 16
    match = filled.cache.match(tokens[:13])
    assert (match.length, match.pages[1]) == (12, [0, *second[1:3]])
    filled.cache.release(match)
    assert filled.length([*tokens, 0]) == 24


def test_a_hole_is_filled_in_part_of_a_node():
    filled = Filled(1, (-1, 2))
    filled.put([1, 2, 3, 4, 5, 6], gone=[5])
    filled.put([1, 2, 3, 9], gone=[1])
    assert [filled.length([*tokens, 0]) for tokens in ([1, 2, 3], [1, 2, 3, 9], [1, 2, 3, 4])] == [3, 4, 3]


def test_a_sliding_group_is_evicted_alone_from_the_beginning_on():
    filled = Filled(1, (-1, 2))
    filled.put([1, 2, 3, 4, 5, 6])
    full, sliding = filled.allocators
    assert filled.cache.evict(3, group=1) == 3
    filled.check()
    assert (full.capacity - full.free, sliding.capacity - sliding.free) == (6, 3)
    assert [filled.length([*range(1, n + 1), 0]) for n in (3, 4, 5, 6)] == [0, 0, 5, 6]
    assert filled.cache.evict(9, group=1) == 3
    assert filled.length([1, 2, 3, 4, 5, 6, 7]) == 0
    assert filled.cache.evict(9, group=1) == 0
    assert filled.cache.evict(2, group=0) == 2
    filled.check()
    assert filled.cache.size == 4


def test_what_was_evicted_is_filled_in_and_evicted_again():
    filled = Filled(1, (-1, 2))
    filled.put([1, 2, 3, 4, 5, 6])
    assert filled.cache.evict(4, group=1) == 4
    filled.put([1, 2, 3, 8])
    assert [filled.length([*range(1, n + 1), 0]) for n in (3, 4, 5, 6)] == [3, 3, 3, 6]
    assert filled.length([1, 2, 3, 8, 0]) == 4
    assert filled.cache.evict(9, group=1) == 6
    filled.check()


class Counting(PageAllocator):
    """Knows how many counts of holders were looked up."""

    looked = 0

    def references(self, page):
        self.looked += 1
        return super().references(page)

    def holders(self, pages):
        for count in super().holders(pages):
            self.looked += 1
            yield count


@pytest.mark.parametrize("group", [None, 0, 1])
def test_page_by_page_costs_no_more_than_all_at_once(group):
    filled = Filled(1, (-1, 4))
    filled.allocators = [Counting(5000), Counting(5000)]
    filled.cache = PrefixCache(1, (-1, 4), filled.allocators)
    filled.put(list(range(2000)))
    filled.put([*range(1000), *range(5000, 6000)])
    for allocator in filled.allocators:
        allocator.looked = 0
    freed = sum(filled.cache.evict(1, group) > 0 for _ in range(1500))
    assert freed == 1500
    # A look at the page after the one that goes, where the search ends.
    assert all(allocator.looked <= 2 * 1500 + 10 for allocator in filled.allocators)


def looks(filled, call):
    """How many counts of holders a call looks up."""
    before = sum(allocator.looked for allocator in filled.allocators)
    call()
    return sum(allocator.looked for allocator in filled.allocators) - before


@pytest.mark.parametrize("held", [10, 1000])
def test_prefixes_in_use_are_passed_over_once(held):
    filled = Filled(1)
    filled.allocators = [Counting(5000)]
    filled.cache = PrefixCache(1, (-1,), filled.allocators)
    pages = filled.allocators[0].allocate(2 * held)
    filled.used = [pages]
    for n in range(held):
        filled.cache.insert([n, n], [pages[2 * n : 2 * n + 2]])
    filled.put([-1] * 50)
    assert filled.cache.evict(1) == 1
    assert looks(filled, lambda: [filled.cache.evict(1) for _ in range(40)]) <= 2 * 40 + 2
    filled.allocators[0].release(filled.used[0][:2])  # one of them is over: it is the first again
    del filled.used[0][:2]
    assert filled.cache.evict(1) == 1
    filled.check()
    assert (filled.length([0, 0, 0]), filled.length([1, 1, 1]), filled.length([-1] * 50)) == (1, 2, 9)


@pytest.mark.parametrize("prefixes", [10, 200])
def test_prefixes_that_a_sliding_group_has_left_are_not_searched_again(prefixes):
    filled = Filled(1, (-1, 2))
    filled.allocators = [Counting(5000), Counting(5000)]
    filled.cache = PrefixCache(1, (-1, 2), filled.allocators)
    for n in range(prefixes):
        filled.put([n, n])
    assert filled.cache.evict(2 * prefixes, group=1) == 2 * prefixes
    filled.put([-1] * 50)
    assert looks(filled, lambda: [filled.cache.evict(1, group=1) for _ in range(40)]) <= 40 + 2
    filled.check()


def test_sliding_pages_in_use_between_free_ones_go_when_they_are_left():
    filled = Filled(1, (-1, 2))
    pages = filled.use(8)
    tokens = list(range(8))
    filled.cache.insert(tokens, pages)
    for gone in (0, 1, 4, 7):
        filled.allocators[1].release([pages[1][gone]])
        filled.used[1].remove(pages[1][gone])
    assert filled.cache.evict(99, group=1) == 4
    filled.put([*tokens[:3], 99])  # splits what has been looked at, and fills in tokens 0 and 1
    assert filled.cache.evict(9, group=1) == 3
    filled.allocators[1].release([filled.used[1].pop(0)])  # of token 2, above the split now
    filled.check()
    assert filled.cache.evict(9, group=1) == 1
    filled.leave()
    filled.check()
    assert filled.cache.evict(9, group=1) == 3
    filled.check()


def test_the_upper_part_of_a_prefix_is_told_of_when_the_lower_one_is_forgotten():
    filled = Filled(1, (-1, 2))
    pages = filled.use(6)
    filled.cache.insert(list(range(6)), pages)
    assert filled.cache.evict(9, group=1) == 0
    filled.put([0, 1, 2, 99])
    for group in (0, 1):
        filled.allocators[group].release(filled.used[group][3:])
        del filled.used[group][3:]
    assert filled.cache.evict(99, group=0) == 4
    filled.check()
    assert filled.cache.size == 3
    filled.leave()
    assert filled.cache.evict(9, group=1) == 3
    filled.check()


@pytest.mark.parametrize("used", [False, True])
def test_a_model_with_windows_only_forgets_what_has_no_pages(used):
    filled = Filled(1, (2, 5))
    if used:
        filled.cache.insert([7, 7, 7], filled.use(3))
    for n in range(20):
        filled.put([7, 7, 7, n, n])
    assert [filled.cache.evict(999, group) for group in (0, 1)] == ([40, 40] if used else [43, 43])
    filled.check()
    assert filled.cache.size == (3 if used else 0), "or the tokens of all requests there ever were would be kept"


def test_room_is_made_whole_or_not_at_all():
    filled = Filled(1, (-1, 2), pages=21)
    filled.put([1, 2, 3, 4])
    filled.put([1, 2, 8, 9])
    filled.put([5, 6, 7])
    for wanted in ([10, 0], [0, 10], [10, 9], [9, 10]):
        assert not filled.cache.make_room(wanted)
        filled.check()
        assert filled.cache.size == 9
    assert filled.cache.make_room([0, 0])
    assert filled.cache.make_room([3, 2])
    filled.check()
    assert filled.cache.size == 6
    assert [filled.length(tokens) for tokens in ([1, 2, 3, 4, 0], [5, 6, 7, 0])] == [2, 3]
    assert filled.cache.make_room([6, 4])
    filled.check()
    assert (filled.cache.size, [a.free for a in filled.allocators]) == (0, [20, 20])


def test_no_room_is_made_of_what_a_request_goes_on_from():
    """It computed the beginning itself, so that nobody holds the cache's; but its own pages hang on those."""
    filled = Filled(1, (-1, 2), pages=30)
    filled.put([1, 2, 3])
    filled.put([7, 8])
    filled.cache.insert([1, 2, 3, 4], filled.use(4))
    assert [a.spare for a in filled.allocators] == [5, 5]
    assert not filled.cache.make_room([3, 4])
    filled.check()
    assert (filled.length([7, 8, 0]), filled.length([1, 2, 3, 4, 0])) == (2, 4)
    assert filled.cache.make_room([2, 5])
    assert filled.length([7, 8, 0]) == 0


def test_room_that_cannot_be_made_is_not_looked_for():
    filled = Filled(1)
    filled.allocators = [Counting(5000)]
    filled.cache = PrefixCache(1, (-1,), filled.allocators)
    for n in range(50):
        filled.put([n, n])
    assert looks(filled, lambda: filled.cache.make_room([101])) == 0


def test_no_room_is_made_of_what_a_match_holds():
    filled = Filled(1, (-1, 2))
    filled.put([1, 2, 3])
    match = filled.cache.match([1, 2, 3, 4])
    assert not filled.cache.make_room([0, 1])
    assert not filled.cache.make_room([1, 0])
    filled.check()
    filled.cache.release(match)
    assert filled.cache.make_room([1, 1])


def test_room_is_asked_for_in_every_group():
    with pytest.raises(InvalidInputError, match="room in 1 groups is asked for; there are 2 groups"):
        Filled(1, (-1, 2)).cache.make_room([3])


def test_sliding_pages_that_are_in_use_are_left():
    filled = Filled(1, (-1, 2))
    filled.cache.insert([1, 2, 3], filled.use(3))
    filled.allocators[1].release([filled.used[1].pop(0)])
    assert filled.cache.evict(9) == 1  # what only the cache has, though the prefix is in use
    assert filled.cache.evict(9, group=1) == 0
    filled.check()
    match = filled.cache.match([1, 2, 3, 4])
    filled.leave()
    assert filled.cache.evict(9, group=1) == 0
    filled.cache.release(match)
    assert filled.cache.evict(9, group=1) == 2
    filled.check()


def test_pages_are_counted_in_the_group_that_lacks_them():
    filled = Filled(1, (-1, 2))
    filled.put([1, 2, 3, 4], gone=[3])
    assert filled.cache.evict(3) == 3  # 2 of the last token, 1 of the one before
    assert filled.cache.size == 2
    assert filled.cache.evict(1, group=0) == 1


def test_a_model_with_windows_only():
    filled = Filled(4, (6,))
    tokens = list(range(16))
    (pages,) = filled.use(4)
    filled.cache.insert(tokens, [[0, 0, *pages[2:]]])
    filled.leave()
    assert filled.length([*tokens, 0]) == 16
    assert filled.cache.evict(9, group=0) == 2
    assert filled.length([*tokens, 0]) == 0
    assert filled.cache.evict(9) == 0
    filled.check()
    assert filled.cache.size == 0, "what has no pages left is forgotten"


def test_a_window_of_nothing_needs_nothing():
    filled = Filled(4, (-1, 0))
    filled.put(list(range(12)), gone=[3])
    match = filled.cache.match(list(range(12)))
    assert (match.length, match.pages[1]) == (8, [0, 0])
    filled.cache.release(match)


def test_token_ids_are_numbers():
    cache = Filled(1).cache
    with pytest.raises(InvalidInputError, match=r"token ids are of <class 'torch.Tensor'>.*pass tokens.tolist"):
        cache.match(torch.tensor([1, 2]))
    with pytest.raises(InvalidInputError, match=r"<class 'str'>"):
        cache.insert("ab", [[1, 2]])


def test_a_namespace_can_be_looked_up():
    filled = Filled(1)
    with pytest.raises(InvalidInputError, match="namespace is a list, which cannot be looked up"):
        filled.cache.match([1, 2], namespace=["tenant"])
    with pytest.raises(InvalidInputError, match="namespace is a dict"):
        filled.cache.insert([1, 2], [[1, 2]], namespace={})


@pytest.mark.parametrize(
    "pages, said",
    [
        ([[1, 2]], "pages of 1 groups are given; there are 2 groups"),
        ([[1, 2], [1]], "group 1 has 1 pages of 4 for 2 whole ones: pass a page for each"),
        ([[1, 0], [1, 2]], "page 1 of group 0 is 0, and a group of full attention gives none back"),
        ([[1, 9], [1, 2]], "page 9 is free, so it cannot be shared"),
        ([[1, 2], [1, 9]], "page 9 is free, so it cannot be shared"),
    ],
)
def test_what_cannot_be_put_in_changes_nothing(pages, said):
    filled = Filled(4, (-1, 8))
    filled.use(2)
    with pytest.raises(InvalidInputError, match=said):
        filled.cache.insert(list(range(9)), pages)
    assert filled.cache.size == 0
    filled.check()


def test_a_hole_that_cannot_be_filled_changes_nothing():
    filled = Filled(4, (-1, 4))
    filled.put(list(range(8)), gone=[1])
    mine = filled.use(3)
    before = [list(filled.cache.held(g)) for g in (0, 1)]
    with pytest.raises(InvalidInputError, match="page 77 is free"):
        filled.cache.insert(list(range(12)), [mine[0], [77, *mine[1][1:]]])
    filled.check()
    assert [list(filled.cache.held(g)) for g in (0, 1)] == before


@pytest.mark.parametrize("group", [-1, 1])
def test_there_is_no_such_group(group):
    with pytest.raises(InvalidInputError, match=f"group {group}: there are groups 0 to 0, and None for all"):
        Filled().cache.evict(1, group)


@pytest.mark.parametrize("page_size, windows", [(0, (-1,)), (4, (-1, -3))])
def test_a_cache_has_a_geometry(page_size, windows):
    with pytest.raises(InvalidInputError, match=r"page_size=0|window -3"):
        PrefixCache(page_size, windows, [PageAllocator(5) for _ in windows])


def leaf(cache):
    """The leaf that would be evicted first."""
    return min((node for node in cache._nodes() if not node.children), key=lambda node: node.used)


def unlink(cache):
    leaf(cache).parent.children.clear()


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda c: leaf(c).tokens.pop(), "node of 3 tokens .* pages of 2 are"),
        (lambda c: leaf(c).pages[1].pop(), r"pages of 2 are \[2, 1\]"),
        (lambda c: leaf(c).tokens.__setitem__(0, 99), "its parent does not find it"),
        (lambda c: setattr(leaf(c), "locks", 1), "0 matches hold it, and more hold what is below"),
        (lambda c: setattr(leaf(c).parent, "locks", 1), "6 pages are cached, 2 of them locked; counted are 6 and 0"),
        (lambda c: c._leaves.clear(), "nothing of it can ever be evicted"),
        (lambda c: setattr(leaf(c), "used", 99), "it would be evicted before what is below it"),
        (lambda c: c._sliding[1].clear(), "its pages of group 1 can never be evicted"),
        (lambda c: leaf(c).seen.__setitem__(1, 1), "page 3 of group 1 is free to go, and nobody knows"),
        (lambda c: leaf(c).pages[0].__setitem__(0, 0), "a page of group 0 is missing, which has full attention"),
        (lambda c: c.allocators[1].release([leaf(c).pages[1][0]]), "page 3 of group 1 is cached and free"),
        (unlink, "nothing of it can ever be evicted"),
        (lambda c: c._roots.__setitem__("x", c._root("x")), "namespace 'x' is empty and not forgotten"),
        (lambda c: setattr(c, "_size", 7), "6 pages are cached, 0 of them locked; counted are 7 and 0"),
        (lambda c: setattr(c, "_locked", 1), "6 pages are cached, 0 of them locked; counted are 6 and 1"),
    ],
)
def test_check_finds_what_is_wrong(spoil, said):
    filled = Filled(2, (-1, 4))
    filled.put([1, 1, 1, 1, 2, 2, 2, 2])
    filled.put([1, 1, 1, 1, 3, 3, 3, 3])
    spoil(filled.cache)
    with pytest.raises(InternalError, match=said):
        filled.cache.check()


PROMPT = st.builds(lambda n, tail: [7] * n + tail, st.integers(0, 24), st.lists(st.integers(0, 1), max_size=8))


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("page_size, window", [(1, -1), (4, -1), (1, 3), (4, 0), (4, 6), (16, 20)])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(calls=st.lists(st.tuples(st.booleans(), PROMPT, st.integers(0, 6)), max_size=12))
def test_matches_as_a_list_of_prefixes_would(page_size, window, calls):
    """The definition: every prefix of whole pages, and whether the sliding group has its last page."""
    filled = Filled(page_size, (-1, window), pages=450)
    known: dict[tuple[int, ...], bool] = {}
    for insert, prompt, gone in calls:
        whole = len(prompt) // page_size
        ends = [tuple(prompt[: (n + 1) * page_size]) for n in range(whole)]
        gone = 0 if window < 0 else min(gone, whole)
        if insert:
            expected = sum(end in known for end in ends) * page_size
            assert filled.put(prompt, [gone])[1] == expected
            for n, end in enumerate(ends):
                known[end] = known.get(end, False) or n >= gone
            continue
        lengths = [0]
        for n, end in enumerate(ends, 1):
            first = 0 if window < 0 else max(0, n * page_size - window) // page_size
            if end in known and n * page_size < len(prompt) and all(known[e] for e in ends[first:n]):
                lengths.append(n * page_size)
        assert filled.length(prompt) == max(lengths)
    assert filled.cache.size == len(known)
