"""Pages: all or nothing, counted by holders, page 0 never given out, and a check that finds every kind of mistake."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from polyattn.errors import InternalError, InvalidInputError, OutOfPagesError, PolyattnError
from polyattn.serving import PageAllocator, check_pages
from polyattn.serving.kv_cache.pages import allocate_all, check_geometry, first_visible_page, share_all


class Held:
    """A holder of some pages of one or more groups."""

    def __init__(self, *groups: list[int]) -> None:
        self.groups = groups

    def held(self, group: int) -> list[int]:
        return self.groups[group]


def test_page_0_is_never_given_out():
    allocator = PageAllocator(5)
    assert (allocator.capacity, allocator.free) == (4, 4)
    assert allocator.allocate(4) == [1, 2, 3, 4]
    assert allocator.free == 0
    assert repr(allocator) == "PageAllocator(capacity=4, free=0)"
    assert PageAllocator(6, reserved=3).allocate(3) == [3, 4, 5]


def test_nothing_is_taken_when_too_few_are_free():
    allocator = PageAllocator(5)
    taken = allocator.allocate(3)
    with pytest.raises(OutOfPagesError, match="2 pages are wanted and 1 of 4 are free: evict") as caught:
        allocator.allocate(2)
    assert vars(caught.value) == {"wanted": 2, "free": 1, "capacity": 4, "group": None}
    assert allocator.free == 1
    allocator.release(taken)
    assert allocator.free == 4
    allocator.check()


def test_a_request_that_never_fits_is_told_so():
    with pytest.raises(OutOfPagesError, match="that many never will be; refuse the request"):
        PageAllocator(5).allocate(5)


def test_out_of_pages_can_be_caught_and_sent_on():
    with pytest.raises(PolyattnError) as caught:
        PageAllocator(5).allocate(9)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))


def test_a_page_lives_as_long_as_anyone_holds_it():
    allocator = PageAllocator(5)
    pages = allocator.allocate(2)
    allocator.share(pages[:1])
    assert [allocator.references(p) for p in range(1, 5)] == [2, 1, 0, 0]
    assert list(allocator.holders(range(5))) == [0, 2, 1, 0, 0]
    allocator.release(pages)
    assert (allocator.free, allocator.references(pages[0])) == (3, 1)
    allocator.release(pages[:1])
    assert allocator.free == 4


def test_a_page_named_twice_loses_two_and_is_free_once():
    allocator = PageAllocator(5)
    page = allocator.allocate(1)[0]
    allocator.share([page])
    allocator.release([page, page])
    assert allocator.free == 4
    allocator.check(held=[])


def test_pages_that_only_a_cache_holds_are_counted():
    allocator = PageAllocator(9)
    pages = allocator.allocate(3)
    allocator.share(pages[:2], cached=True)
    assert allocator.spare == 0
    allocator.release(pages)
    assert (allocator.spare, allocator.free) == (2, 6)
    allocator.share(pages[:1])
    allocator.check()
    assert allocator.spare == 1
    allocator.release(pages[:2], cached=True)
    assert (allocator.spare, allocator.free, allocator.references(pages[0])) == (0, 7, 1)
    allocator.check()


def test_a_page_that_is_cached_twice_is_spare_when_it_is_once():
    allocator = PageAllocator(9)
    page = allocator.allocate(1)
    allocator.share(page, cached=True)
    allocator.share(page, cached=True)
    allocator.release(page)
    assert allocator.spare == 0
    allocator.release(page, cached=True)
    assert allocator.spare == 1
    allocator.check(held=page)


@pytest.mark.parametrize("cached", [False, True])
def test_what_is_refused_leaves_the_count_of_spare_pages(cached):
    allocator = PageAllocator(9)
    one, other = allocator.allocate(2)
    allocator.share([one, other], cached=True)
    allocator.release([one])
    for call in (allocator.share, allocator.release):
        with pytest.raises(InvalidInputError, match="page 8 is free"):
            call([one, other, 8], cached=cached)
        allocator.check(held=[one, other, other])
        assert allocator.spare == 1


def test_a_cache_may_have_a_page_at_two_places():
    allocator = PageAllocator(9)
    (page,) = allocator.allocate(1)
    allocator.share([page, page], cached=True)
    allocator.release([page])
    allocator.check(held=[page, page])
    allocator.release([page, page], cached=True)
    assert (allocator.spare, allocator.free) == (0, 8)
    allocator.check(held=[])


def test_who_asked_is_told_once_that_nobody_else_holds_a_page():
    allocator = PageAllocator(9)
    pages, said = allocator.allocate(2), []
    allocator.share(pages, cached=True)
    allocator.share(pages[:1])
    allocator.tell(pages[0], lambda: said.append("one"))
    allocator.tell(pages[0], lambda: said.append("two"))
    allocator.release(pages)
    assert said == []
    allocator.release(pages[:1])
    assert said == ["one", "two"]
    allocator.share(pages[:1])
    allocator.release(pages[:1])
    assert said == ["one", "two"]


def test_what_was_given_back_last_is_given_out_first():
    allocator = PageAllocator(9)
    pages = allocator.allocate(4)
    allocator.release(pages[1:3])
    assert allocator.allocate(3) == [*pages[1:3], 5]


@pytest.mark.parametrize("verb", ["share", "release"])
@pytest.mark.parametrize(
    "page, said", [(0, "page 0 is reserved"), (3, "page 3 is free"), (9, "9 does not exist"), (-1, "-1 does not exist")]
)
def test_only_held_pages_are_shared_and_released(verb, page, said):
    allocator = PageAllocator(5)
    mine = allocator.allocate(2)
    with pytest.raises(InvalidInputError, match=f"{said}, so it cannot be {verb}d: name pages that are held"):
        getattr(allocator, verb)([*mine, page])
    allocator.check(held=mine)


def test_a_page_is_not_released_more_often_than_it_is_held():
    allocator = PageAllocator(5)
    mine = allocator.allocate(2)
    with pytest.raises(InvalidInputError, match="page 1 is released 2 times at once and held 1 times"):
        allocator.release([*mine, mine[0]])
    allocator.check(held=mine)


@pytest.mark.parametrize("page, said", [(0, "reserved"), (5, "does not exist"), (-1, "does not exist")])
def test_references_of_no_page(page, said):
    with pytest.raises(InvalidInputError, match=f"page {page} .*{said}; pages 1 to 4 can be asked for"):
        PageAllocator(5).references(page)


def test_counts_are_whole_and_not_negative():
    with pytest.raises(InvalidInputError, match="-1 pages cannot be allocated"):
        PageAllocator(5).allocate(-1)
    assert PageAllocator(5).allocate(0) == []
    with pytest.raises(InvalidInputError, match=r"count=1\.0 is a float; a whole number is needed"):
        PageAllocator(5).allocate(1.0)
    with pytest.raises(InvalidInputError, match="pages='5' is a str"):
        PageAllocator("5")
    with pytest.raises(InvalidInputError, match="reserved=None is a NoneType"):
        PageAllocator(5, reserved=None)


@pytest.mark.parametrize(
    "pages, reserved, said",
    [(5, 0, "reserved=0: page 0 is the padding page"), (1, 1, "2 or more are needed"), (3, 4, "5 or more are needed")],
)
def test_an_allocator_has_pages_and_a_padding_page(pages, reserved, said):
    with pytest.raises(InvalidInputError, match=said):
        PageAllocator(pages, reserved=reserved)


def broken(**state):
    allocator = PageAllocator(5)
    allocator.allocate(2)
    for name, value in state.items():
        setattr(allocator, name, value)
    return allocator


@pytest.mark.parametrize(
    "allocator, held, said",
    [
        (broken(_free=[3, 4, 4]), None, "page 4 is 2 times among the free pages"),
        (broken(_free=[0, 3, 4]), None, "page 0 is among the free pages, and was never one to give out"),
        (broken(_free=[7, 3, 4]), None, "page 7 is among the free pages, and was never one to give out"),
        (broken(_spare=1), None, r"1 pages are counted that only a cache holds, and they are \[\]"),
        (broken(_cached=[0, 0, 1, 0, 0]), None, r"0 pages are counted that only a cache holds, and they are \[2\]"),
        (broken(_free=[4]), None, "page 3 is given out and its count of holders is 0"),
        (broken(_references=[0, 1, 1, 1, 0]), None, "page 3 is free and its count of holders is 1"),
        (broken(_references=[1, 1, 1, 0, 0]), None, "page 0 is reserved and its count of holders is 1"),
        (broken(_references=[0, 1, -1, 0, 0]), None, "page 2 is given out and its count of holders is -1"),
        (broken(), [1], "page 2 is held 0 times and its count of holders is 1"),
        (broken(), [1, 2, 2], "page 2 is held 2 times and its count of holders is 1"),
        (broken(), [1, 2, 3], "page 3 is held 1 times and its count of holders is 0"),
        (broken(), [1, 2, 0], "page 0 is held 1 times and its count of holders is 0"),
        (broken(), [1, 2, 8], "page 8 is held and no such page exists"),
    ],
)
def test_check_finds_what_is_wrong(allocator, held, said):
    with pytest.raises(InternalError, match=said):
        allocator.check(held)


def test_check_pages_adds_up_the_holders():
    one, two = PageAllocator(5), PageAllocator(5)
    first, second = one.allocate(2), two.allocate(1)
    one.share(first[:1])
    check_pages([one, two], Held(first, second), Held(first[:1], []))
    with pytest.raises(InternalError, match="page 1 is held 1 times and its count of holders is 2"):
        check_pages([one, two], Held(first, second))


def test_groups_may_share_an_allocator():
    allocator = PageAllocator(5)
    first, second = allocator.allocate(2), allocator.allocate(1)
    check_pages([allocator, allocator], Held(first, second))
    with pytest.raises(InternalError, match="page 3 is held 0 times"):
        check_pages([allocator, allocator], Held(first, []))


def test_pages_of_several_groups_are_all_or_nothing():
    allocators = [PageAllocator(5), PageAllocator(3)]
    assert allocate_all(allocators, [1, 2]) == [[1], [1, 2]]
    with pytest.raises(OutOfPagesError, match="group 1: 1 pages are wanted and 0 of 2") as caught:
        allocate_all(allocators, [2, 1])
    assert (caught.value.group, caught.value.wanted, caught.value.free, caught.value.capacity) == (1, 1, 0, 2)
    assert isinstance(caught.value.__cause__, OutOfPagesError)
    assert [a.free for a in allocators] == [3, 0]
    with pytest.raises(InvalidInputError, match="page 4 is free"):
        share_all([allocators[1], allocators[0]], [[1, 0, 2], [4]])
    assert [allocators[1].references(p) for p in (1, 2)] == [1, 1]


@pytest.mark.parametrize(
    "length, window, page_size, first",
    [
        (100, -1, 16, 0),
        (100, 36, 16, 4),
        (100, 37, 16, 3),
        (10, 20, 16, 0),
        (16, 0, 16, 1),
        (17, 0, 16, 1),
        (5, 2, 1, 3),
    ],
)
def test_the_first_page_that_is_still_seen(length, window, page_size, first):
    assert first_visible_page(length, window, page_size) == first
    seen = range(0 if window < 0 else max(0, length - window), length)
    assert not seen or seen[0] // page_size == first


@pytest.mark.parametrize(
    "page_size, windows, said",
    [
        (0, (-1,), "page_size=0"),
        (16, (), "0 windows and 1 allocators"),
        (16, (-1, 4), "2 windows and 1 allocators"),
        (16, (-2,), "window -2: it is the number of earlier keys a query sees, or -1"),
        (4.5, [-1], "page_size=4.5 is a float"),
        (4, [None], "window=None is a NoneType"),
    ],
)
def test_geometry_is_checked(page_size, windows, said):
    with pytest.raises(InvalidInputError, match=said):
        check_geometry(page_size, windows, [PageAllocator(5)])


def test_host_memory_needs_no_torch():
    code = (
        "import sys; from polyattn.serving import PageAllocator, PrefixCache; "
        "PrefixCache(16, (-1,), [PageAllocator(5)]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_more_pages_than_there_is_memory_for():
    with pytest.raises(
        InvalidInputError, match=r"an allocator of pages=\d+ needs more memory than can be had: give it"
    ):
        PageAllocator(10**15)
