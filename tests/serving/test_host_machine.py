"""Any order of calls leaves every page accounted for, and every query sees the tokens it should."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from polyattn.errors import InvalidInputError, OutOfPagesError

from .host import World

# Some pages and some tokens more: few values, so that prompts share beginnings and part at every place of a page.
LENGTHS = st.tuples(st.integers(0, 3), st.integers(-2, 3))
TAILS = st.lists(st.integers(0, 1), max_size=4)
NAMESPACES = st.sampled_from([None, None, "adapter"])
CHOICES = st.integers(0, 5)


def running(machine: Machine) -> bool:
    return bool(machine.world.requests)


class Machine(RuleBasedStateMachine):
    page_size = 1
    windows: tuple[int, ...] = (-1,)
    pages: tuple[int, ...] = (24,)

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.page_size, self.windows, self.pages, rows=5, max_tokens=self.most)

    @property
    def most(self) -> int:
        return 12 * self.page_size + 8

    def _tokens(self, length: tuple[int, int], tail: list[int]) -> list[int]:
        pages, more = length
        return [7] * max(pages * self.page_size + more, 0) + tail

    def _state(self) -> tuple:
        """Everything that a call which raised must have left alone."""
        world = self.world
        rows = {r: [world.table.pages(r, g) for g in range(len(self.windows))] for r in world.requests}
        held = [sorted(world.cache.held(group)) for group in range(len(self.windows))]
        return rows, held, [a.free for a in world.allocators], world.table.rows

    def _row(self, choice: int) -> int:
        rows = list(self.world.requests)
        return rows[choice % len(rows)]

    def _write(self, row: int, tokens: list[int]) -> None:
        """Extend a row, or see that a refusal is the right one and changes nothing."""
        before, table = self._state(), self.world.table
        if table.length(row) + len(tokens) > table.max_tokens:
            with pytest.raises(InvalidInputError, match=f"room for {table.max_tokens}"):
                table.extend(row, len(tokens))
            assert self._state() == before
            return
        wanted = table.wanted(row, len(tokens))
        if all(n <= a.free for n, a in zip(wanted, self.world.allocators, strict=True)):
            self.world.write(row, tokens)
            return
        with pytest.raises(OutOfPagesError) as caught:
            table.extend(row, len(tokens))
        assert caught.value.wanted == wanted[caught.value.group] > caught.value.free
        assert self._state() == before

    @rule(length=LENGTHS, tail=TAILS, namespace=NAMESPACES)
    def add(self, length, tail, namespace):
        prompt = [*self._tokens(length, tail), 1]
        if not self.world.table.free:
            with pytest.raises(InvalidInputError, match="rows are in use"):
                self.world.table.add()
            return
        row = self.world.add(prompt, namespace)
        assert self.world.table.length(row) < len(prompt)
        self._write(row, prompt[self.world.table.length(row) :])

    @precondition(running)
    @rule(choice=CHOICES, length=LENGTHS, tail=TAILS)
    def extend(self, choice, length, tail):
        self._write(self._row(choice), self._tokens(length, tail))

    @precondition(running)
    @rule(choice=CHOICES, token=st.integers(0, 1))
    def decode(self, choice, token):
        self._write(self._row(choice), [token])

    @precondition(running)
    @rule(choice=CHOICES, back=LENGTHS)
    def truncate(self, choice, back):
        row = self._row(choice)
        length = max(self.world.table.length(row) - len(self._tokens(back, [])), 0)
        before, gone = self._state(), False
        for group, window in enumerate(self.windows):
            pages = self.world.table.pages(row, group)[: -(-length // self.page_size)]
            gone |= 0 in pages[0 if window < 0 else max(0, length - window) // self.page_size :]
        if not gone:
            self.world.truncate(row, length)
            return
        with pytest.raises(InvalidInputError, match="has given back"):
            self.world.truncate(row, length)
        assert self._state() == before

    @precondition(lambda self: self.world.requests and self.world.table.free)
    @rule(choice=CHOICES)
    def fork(self, choice):
        self.world.fork(self._row(choice))

    @precondition(running)
    @rule(choice=CHOICES)
    def slide(self, choice):
        self.world.table.slide(self._row(choice))

    @precondition(running)
    @rule(choice=CHOICES)
    def insert(self, choice):
        row, size = self._row(choice), self.world.cache.size
        known = self.world.insert(row)
        whole = len(self.world.requests[row].tokens) // self.page_size
        assert self.world.cache.size == size + whole - known // self.page_size

    @precondition(running)
    @rule(choice=CHOICES)
    def unlock(self, choice):
        self.world.unlock(self._row(choice))

    @precondition(running)
    @rule(choice=CHOICES, insert=st.booleans())
    def remove(self, choice, insert):
        row = self._row(choice)
        if insert:
            self.world.insert(row)
        self.world.remove(row)

    @rule(pages=st.integers(1, 8), group=st.sampled_from([None, 0, 1]))
    def evict(self, pages, group):
        if group is not None and group >= len(self.windows):
            return
        counted = self.world.allocators if group is None else [self.world.allocators[group]]
        free = sum(a.free for a in counted)
        most = self._most(group) if group is not None else 0
        freed = self.world.cache.evict(pages, group)
        assert sum(a.free for a in counted) == free + freed
        assert freed >= min(pages, most)
        # The last page that is forgotten can free one in every group.
        assert freed < pages + len(counted)

    @rule(pages=st.lists(st.integers(0, 8), min_size=3, max_size=3))
    def make_room(self, pages):
        wanted = pages[: len(self.windows)]
        before, free = self._state(), [a.free for a in self.world.allocators]
        there = all(self._most(group) >= n for group, n in enumerate(wanted))
        assert self.world.cache.make_room(wanted) == there
        if there:
            assert all(a.free >= f + n for a, f, n in zip(self.world.allocators, free, wanted, strict=True))
        else:
            assert self._state() == before

    def _most(self, group: int) -> int:
        """The pages of a group that could be evicted, by the definition: those of no match and no request; of full
        attention those that nothing stays behind."""
        cache, held = self.world.cache, self.world.allocators

        def of(node) -> tuple[int, bool]:
            """How many in a node and below it, and whether that is all."""
            below = [of(child) for child in node.children.values()]
            count, rest = sum(n for n, _ in below), all(whole for _, whole in below) and not node.locks
            for pages in reversed(list(zip(*node.pages, strict=True))):
                alone = all(not page or a.references(page) == 1 for a, page in zip(held, pages, strict=True))
                rest = rest and alone
                sliding = pages[group] and not node.locks and held[group].references(pages[group]) == 1
                count += bool(sliding) if self.windows[group] >= 0 else rest
            return count, rest

        return sum(of(root)[0] for root in cache._roots.values())

    @rule()
    def flush(self):
        self.world.table.flush()

    @invariant()
    def in_order(self):
        self.world.check()

    def teardown(self):
        self.world.end()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "page_size, windows, pages",
    [
        (1, (-1,), (24,)),
        (1, (-1, 5), (36, 24)),
        (16, (-1,), (15,)),
        (16, (-1, 20), (16, 12)),
        (64, (-1, 0, 70), (15, 8, 12)),
    ],
)
def test_any_order_of_calls(page_size, windows, pages):
    machine = type("Machine", (Machine,), {"page_size": page_size, "windows": windows, "pages": pages})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
    )
