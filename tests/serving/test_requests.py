"""Rows: pages by need, copy-on-write, cutting, sliding windows, forks, and tables on the device that say the same."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn.errors import InternalError, InvalidInputError, OutOfPagesError
from polyattn.serving import PageAllocator, PageCopy, PrefixCache, RequestTable, check_pages

PAGE_SIZES = (1, 16, 64)


def table(page_size=16, windows=(-1,), pages=40, requests=4, max_tokens=1024):
    return RequestTable(requests, max_tokens, page_size, windows, [PageAllocator(pages) for _ in windows])


def row_of(rows, tokens):
    row = rows.add()
    assert rows.extend(row, tokens) == []
    return row


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_tokens_take_pages_when_they_need_them(page_size):
    rows = table(page_size, pages=2000)
    row = rows.add()
    for length, more in ((1, 1), (page_size, page_size - 1), (page_size + 1, 1), (3 * page_size, 2 * page_size - 1)):
        before = len(rows.pages(row, 0))
        assert rows.wanted(row, more) == (-(-length // page_size) - before,)
        rows.extend(row, more)
        assert rows.length(row) == length
        assert len(rows.pages(row, 0)) == -(-length // page_size)
    rows.check()
    check_pages(rows.allocators, rows)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("windows", [(-1,), (-1, 20)])
def test_many_rows_are_extended_as_one_by_one(page_size, windows):
    both = [table(page_size, windows, pages=2000, requests=8) for _ in range(2)]
    for rows in both:
        for length in (0, 1, page_size, page_size + 1, 3 * page_size - 1):
            row_of(rows, length)
        rows.fork(3)  # shares a page that is not full, where pages have more than one token
    for counts in ([1] * 6, [3, 0, 70, 1, 5, 2], [page_size] * 6):
        copies = both[0].extend_all(range(6), counts)
        one_by_one = [copy for row, count in enumerate(counts) for copy in both[1].extend(row, count)]
        assert sorted((c.group, c.source) for c in copies) == sorted((c.group, c.source) for c in one_by_one)
        for rows in both:
            rows.slide_all(range(6))
            rows.flush()
            rows.check()
            check_pages(rows.allocators, rows)
        assert both[0].lengths(range(6)) == [both[1].length(row) for row in range(6)]
        for group in range(len(windows)):
            pages = [[[bool(p) for p in rows.pages(row, group)] for row in range(6)] for rows in both]
            assert pages[0] == pages[1]
    assert both[0].extend_all([], 1) == []


def test_of_a_page_that_two_forks_go_on_in_one_keeps_it():
    rows = table(pages=4, requests=3)
    first = row_of(rows, 20)
    a, b = rows.fork(first), rows.fork(first)
    (shared,) = rows.pages(first, 0)[1:]
    rows.remove(first)
    (copy,) = rows.extend_all([a, b], 1)  # a second copy would find no page
    assert (copy.source, rows.pages(b, 0)[1], rows.pages(a, 0)[1]) == (shared, shared, copy.target)
    check_pages(rows.allocators, rows)


def test_all_rows_are_extended_or_none():
    rows = RequestTable(3, 1024, 16, (-1, 40), [PageAllocator(40), PageAllocator(6)])
    three = [row_of(rows, 16) for _ in range(3)]
    with pytest.raises(OutOfPagesError, match="group 1: 3 pages are wanted and 2 of 5 are free") as caught:
        rows.extend_all(three, 1)
    assert (caught.value.wanted, caught.value.free, caught.value.group) == (3, 2, 1)
    assert rows.lengths(three) == [16, 16, 16]
    assert [a.free for a in rows.allocators] == [36, 2]
    check_pages(rows.allocators, rows)


def test_who_can_make_room_is_told_what_is_lacking():
    rows = RequestTable(3, 1024, 16, (-1, 40), [PageAllocator(40), PageAllocator(6)])
    three, lacking = [row_of(rows, 16) for _ in range(3)], []
    spared = rows.allocators[1].allocate(2)
    assert rows.extend_all(three[:2], 0, lacking.append) == []
    with pytest.raises(OutOfPagesError, match="3 pages are wanted and 0 of 5 are free"):
        rows.extend_all(three, 1, lacking.append)
    assert lacking == [[0, 3]]
    rows.remove(three.pop())
    rows.extend_all(three, 1, lambda wanted: rows.allocators[1].release(spared[: wanted[1]]))
    assert (rows.lengths(three), rows.allocators[1].free) == ([17, 17], 0)


@pytest.mark.parametrize(
    "rows, tokens, said",
    [
        ([0, 0], 1, r"rows \[0, 0\] get \[1, 1\] tokens more: each row comes once"),
        ([0, 1], [1], r"rows \[0, 1\] get \[1\] tokens more: each row comes once, with one number of tokens"),
        ([0, 5], 1, r"row 5 is no request: rows in use are \[0, 1\]"),
        ([0, 1], [1, -1], "row 1 cannot get -1 tokens more"),
        ([0, 1], [1, 2000], "row 1 would have 2020 tokens and the table has room for 1024"),
        ([0, 1], [1, 1.0], r"tokens=1\.0 is a float; a whole number is needed"),
    ],
)
def test_rows_that_cannot_be_extended_change_nothing(rows, tokens, said):
    made = table()
    assert [row_of(made, 20), row_of(made, 20)] == [0, 1]
    with pytest.raises(InvalidInputError, match=said):
        made.extend_all(rows, tokens)
    assert made.lengths([0, 1]) == [20, 20]
    check_pages(made.allocators, made)


def test_rows_come_and_go():
    rows = table()
    a, b = row_of(rows, 20), row_of(rows, 40)
    assert (rows.rows, rows.free) == ([a, b], 2)
    taken = rows.pages(a, 0)
    rows.remove(a)
    assert rows.rows == [b]
    assert rows.allocators[0].free == 39 - 3
    assert row_of(rows, 20) == a
    assert rows.pages(a, 0) == taken
    check_pages(rows.allocators, rows)


def test_a_full_table_says_so():
    rows = table(requests=1)
    rows.add()
    with pytest.raises(InvalidInputError, match="all 1 rows are in use: remove a request first"):
        rows.add()


def test_a_fork_needs_a_row():
    rows = table(requests=1)
    row = row_of(rows, 20)
    with pytest.raises(InvalidInputError, match="all 1 rows are in use"):
        rows.fork(row)
    check_pages(rows.allocators, rows)


def test_nothing_is_taken_in_any_group_when_one_has_too_few():
    rows = RequestTable(2, 1024, 16, (-1, 40), [PageAllocator(40), PageAllocator(4)])
    row = row_of(rows, 20)
    with pytest.raises(OutOfPagesError, match="group 1: 2 pages are wanted and 1 of 3 are free") as caught:
        rows.extend(row, 40)
    assert caught.value.group == 1
    assert rows.length(row) == 20
    assert [a.free for a in rows.allocators] == [37, 1]
    rows.check()


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda t, r: t.extend(r, 1025), "would have 1025 tokens and the table has room for 1024"),
        (lambda t, r: t.wanted(r, 1025), "would have 1025 tokens"),
        (lambda t, r: t.extend(r, -1), "cannot get -1 tokens more; truncate"),
        (lambda t, r: t.truncate(r, 1), "has 0 tokens and cannot be cut to 1"),
        (lambda t, r: t.truncate(r, -1), "cannot be cut to -1"),
        (lambda t, r: t.length(3), "row 3 is no request: rows in use are"),
        (lambda t, r: t.remove(-1), "row -1 is no request"),
        (lambda t, r: t.remove([r]), r"row \[0\] is no request"),
        (lambda t, r: t.extend(r, 1.5), "tokens=1.5 is a float; a whole number is needed"),
        (lambda t, r: t.wanted(r, "1"), "tokens='1' is a str"),
        (lambda t, r: t.truncate(r, None), "length=None is a NoneType"),
    ],
)
def test_wrong_numbers(call, said):
    rows = table()
    row = rows.add()
    with pytest.raises(InvalidInputError, match=said):
        call(rows, row)
    assert rows.length(row) == 0


def test_counts_of_other_kinds_become_ints():
    rows = table()
    row = rows.add()
    rows.extend(row, torch.tensor(3))
    assert type(rows.length(row)) is int
    assert rows.length(row) == 3


@pytest.mark.parametrize("given, said", [({"requests": 0}, "requests=0"), ({"max_tokens": 0}, "max_tokens=0")])
def test_a_table_has_room(given, said):
    with pytest.raises(InvalidInputError, match=f"{said}: a request table has room for 1 or more"):
        table(**given)
    (name,) = given
    with pytest.raises(InvalidInputError, match=rf"{name}=1\.5 is a float; a whole number is needed"):
        table(**{name: 1.5})


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_first_to_write_into_a_shared_last_page_gets_a_copy(page_size):
    rows = table(page_size, windows=(-1, 200), pages=400)
    a = row_of(rows, 2 * page_size + page_size // 2)
    b = rows.fork(a)
    shared = [rows.pages(a, group) for group in (0, 1)]
    assert [rows.pages(b, group) for group in (0, 1)] == shared
    assert rows.length(b) == rows.length(a)
    copies = rows.extend(b, 1)
    if page_size == 1:  # the next token begins a page
        assert copies == []
    else:
        new = [rows.pages(b, group)[-1] for group in (0, 1)]
        assert copies == [PageCopy(group, shared[group][-1], new[group]) for group in (0, 1)]
        assert [rows.pages(b, group)[:-1] for group in (0, 1)] == [pages[:-1] for pages in shared]
    assert [rows.pages(a, group) for group in (0, 1)] == shared
    assert rows.extend(a, 1) == []
    check_pages(rows.allocators, rows)


def test_copies_are_counted_before_pages_are_taken():
    rows = table(pages=3)
    a = row_of(rows, 20)
    b = rows.fork(a)
    assert rows.wanted(b, 1) == (1,)
    with pytest.raises(OutOfPagesError):
        rows.extend(b, 1)
    assert rows.extend(a, 0) == []
    rows.remove(a)
    assert rows.wanted(b, 1) == (0,)
    assert rows.extend(b, 1) == []


def test_a_cached_page_is_not_written_after_a_cut_into_it():
    rows = table()
    cache = PrefixCache(16, (-1,), rows.allocators)
    row = row_of(rows, 32)
    cache.insert(list(range(32)), [rows.pages(row, 0)])
    cached = rows.pages(row, 0)
    rows.truncate(row, 20)
    (copy,) = rows.extend(row, 4)
    assert (copy.source, copy.target) == (cached[1], rows.pages(row, 0)[1])
    assert copy.source != copy.target
    check_pages(rows.allocators, rows, cache)


def test_drafts_are_cut_off():
    rows = table()
    row = row_of(rows, 30)
    rows.extend(row, 8)
    rows.truncate(row, 31)
    assert (rows.length(row), len(rows.pages(row, 0)), rows.allocators[0].free) == (31, 2, 37)
    rows.truncate(row, 0)
    assert (rows.pages(row, 0), rows.allocators[0].free) == ([], 39)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("window", [0, 1, 15, 16, 63, 64, 100])
def test_pages_out_of_the_window_are_given_back(page_size, window):
    rows = table(page_size, windows=(-1, window), pages=600)
    row = rows.add()
    for length in range(1, 4 * page_size + window, max(1, page_size // 3)):
        rows.extend(row, length - rows.length(row))
        rows.slide(row)
        seen = range(max(0, length - window), length)
        pages = rows.pages(row, 1)
        assert all(pages[position // page_size] for position in seen)
        needed = {position // page_size for position in seen} | ({length // page_size} if length % page_size else set())
        assert sum(map(bool, pages)) == len(needed)
        assert all(rows.pages(row, 0))
    rows.flush()
    rows.check()
    check_pages(rows.allocators, rows)


def test_a_cut_never_reaches_behind_the_window():
    rows = table(windows=(-1, 20))
    row = row_of(rows, 103)
    rows.slide(row)
    rows.truncate(row, 100)
    with pytest.raises(InvalidInputError, match=r"cut to 99 tokens: group 1 has given back its first 5 pages"):
        rows.truncate(row, 99)
    assert rows.length(row) == 100
    rows.truncate(row, 0)
    rows.extend(row, 5)
    assert all(rows.pages(row, 1))
    rows.check()
    check_pages(rows.allocators, rows)


def test_a_fork_of_a_row_that_slid():
    rows = table(windows=(20,))
    row = row_of(rows, 100)
    rows.slide(row)
    fork = rows.fork(row)
    assert rows.pages(fork, 0) == rows.pages(row, 0)
    rows.extend(fork, 40)
    rows.slide(fork)
    rows.remove(row)
    rows.check()
    check_pages(rows.allocators, rows)


def test_a_row_begins_with_a_cached_prefix():
    rows = table(windows=(-1, 20))
    cache = PrefixCache(16, (-1, 20), rows.allocators)
    first = row_of(rows, 64)
    tokens = list(range(64))
    cache.insert(tokens, [rows.pages(first, 0), rows.pages(first, 1)])
    match = cache.match([*tokens, 1])
    row = rows.add()
    rows.adopt(row, match)
    assert rows.length(row) == 64
    assert rows.pages(row, 0) == rows.pages(first, 0)
    assert rows.pages(row, 1) == [0, 0, *rows.pages(first, 1)[2:]]
    rows.flush()
    rows.check()
    cache.release(match)
    rows.remove(first)
    cache.clear()
    check_pages(rows.allocators, rows, cache)
    rows.check()


def test_a_match_fits_or_is_refused():
    rows = table()
    cache = PrefixCache(16, (-1,), rows.allocators)
    row = row_of(rows, 48)
    cache.insert(list(range(48)), [rows.pages(row, 0)])
    match = cache.match(list(range(48)))
    assert match.length == 32
    with pytest.raises(InvalidInputError, match="row 0 has 48 tokens: only an empty row can begin with a prefix"):
        rows.adopt(row, match)
    empty = rows.add()
    for other, said in (
        (table(windows=(-1, 4)), "32 tokens in 1 groups does not fit a table of 2 groups and pages of 16"),
        (table(64), "does not fit a table of 1 groups and pages of 64"),
        (table(8), "does not fit a table of 1 groups and pages of 8"),
        (table(windows=(4,)), r"does not fit a table of 1 groups and pages of 16, with windows \[4\]"),
        (table(max_tokens=16), "would have 32 tokens and the table has room for 16"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            other.adopt(other.add(), match)
    cache.release(match)
    with pytest.raises(InvalidInputError, match="the match was released, so its pages may hold other tokens"):
        rows.adopt(empty, match)
    check_pages(rows.allocators, rows, cache)


def test_a_match_of_a_window_does_not_fit_full_attention():
    rows, full = table(windows=(4,)), table()
    cache = PrefixCache(16, (4,), rows.allocators)
    row = row_of(rows, 48)
    cache.insert(list(range(48)), [rows.pages(row, 0)])
    match = cache.match(list(range(48)))
    assert match.pages[0][0] == 0, "before what the window sees"
    with pytest.raises(InvalidInputError, match=r"does not fit a table of 1 groups and pages of 16, with windows \[-1"):
        full.adopt(full.add(), match)


def test_the_device_has_what_the_host_has():
    rows = table(windows=(-1, 20), max_tokens=160)
    assert [t.shape for t in rows.tables] == [(4, 10)] * 2
    assert {t.dtype for t in rows.tables} == {torch.int32}
    a, b = row_of(rows, 103), row_of(rows, 33)
    at = [t.data_ptr() for t in rows.tables]
    rows.flush()
    rows.slide(a)
    rows.extend(b, 20)
    rows.truncate(a, 100)
    rows.flush()
    for group in (0, 1):
        expected = torch.zeros(4, 10, dtype=torch.int32)
        for row in (a, b):
            pages = rows.pages(row, group)
            expected[row, : len(pages)] = torch.tensor(pages)
        assert torch.equal(rows.tables[group], expected)
    rows.remove(a)
    c = row_of(rows, 17)
    assert c == a
    rows.flush()
    assert rows.tables[0][c].tolist() == rows.pages(c, 0) + [0] * 8
    rows.remove(b)
    rows.remove(c)
    rows.flush()
    assert not any(t.any() for t in rows.tables)
    assert [t.data_ptr() for t in rows.tables] == at, "a recorded graph reads these addresses"


class Ops(TorchDispatchMode):
    """The operators that run, and the most numbers that one of them is given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        if func.overloadpacket.__name__ == "index_copy_":
            self.largest = max(self.largest, args[3].numel())
        return func(*args, **kwargs or {})


def test_a_flush_copies_only_what_changed():
    rows = table(1, pages=2000, max_tokens=2000)
    row = row_of(rows, 1000)
    rows.flush()
    rows.extend(row, 1)
    with Ops() as ops:
        rows.flush()
    assert ops.largest == 1
    assert not {"_local_scalar_dense", "item", "nonzero", "equal"} & set(ops.names)
    with Ops() as ops:
        rows.flush()
    assert ops.names == []


def test_changes_that_wait_for_a_flush_stay_few():
    rows = table(1, windows=(5,), pages=2000, max_tokens=2000)
    row = rows.add()
    for _ in range(1000):
        rows.extend(row, 1)
        rows.slide(row)
    assert len(rows._changed[0][row]) <= 2
    rows.flush()
    rows.check()


def test_a_flush_asks_the_device_nothing():
    # Fake tensors on a device that is not there raise where a value is asked for.
    rows = table()
    row_of(rows, 100)
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows.tables = tuple(torch.zeros(t.shape, dtype=t.dtype, device="meta") for t in rows.tables)
        rows.flush()


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda t: t._free.append(0), "row 0 is free and in use"),
        (lambda t: t._free.pop(), "1 rows in use and 2 free are not all rows"),
        (lambda t: t._rows[0].pages[0].pop(), "row 0, group 0: 6 pages of 16 for 100 tokens"),
        (lambda t: t._rows[0].pages[1].__setitem__(5, 0), "row 0, group 1: exactly the first 5 pages are given back"),
        (lambda t: t._rows[0].pages[1].__setitem__(0, 1), "row 0, group 1: exactly the first 5 pages are given back"),
        (lambda t: setattr(t._rows[0], "length", 97), "5 pages are given back, and the next query sees some"),
        (lambda t: t.allocators[0].release([7]), "row 0, group 0: page 7 is in its table and free"),
        (lambda t: t.tables[0].fill_(1), "row 0, group 0: the table on the device is not the one on the host"),
        (lambda t: t.tables[1][3].fill_(1), "row 3, group 1: the table on the device"),
    ],
)
def test_check_finds_what_is_wrong(spoil, said):
    rows = table(windows=(-1, 18))
    row = row_of(rows, 100)
    rows.slide(row)
    rows.flush()
    rows.check()
    spoil(rows)
    with pytest.raises(InternalError, match=said):
        rows.check()


def test_more_rows_than_there_is_memory_for():
    said = (
        r"a request table of requests=\d+ with max_tokens=\d+ in pages of 1 needs more memory than can be had.*: lower"
    )
    with pytest.raises(InvalidInputError, match=said):
        RequestTable(10**7, 10**9, 1, [-1], [PageAllocator(5)])
