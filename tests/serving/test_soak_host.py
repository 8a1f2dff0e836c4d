"""Two thousand requests come, share, fork, are cut, cancelled and preempted, with few pages: nothing leaks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from polyattn.errors import OutOfPagesError

from .host import World

REQUESTS = 2000


class Soak:
    """A scheduler in small: it evicts when pages run out, then preempts the youngest, and admits again what it lost."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random = world, random.Random(seed)
        self.waiting: list[tuple[list[int], str | None]] = []
        self.targets: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        stems = (2, 3, 5, 40)
        self.stems = [[self.random.randrange(4) for _ in range(world.page_size * n // 2)] for n in stems]

    def prompt(self) -> list[int]:
        stem = self.random.choice(self.stems)
        return [*stem[: self.random.randint(1, len(stem))], *self.random.choices(range(4), k=self.random.randint(1, 9))]

    def room(self, row: int, tokens: list[int]) -> bool:
        """Write tokens of a row, whatever that takes; False where it was the row itself that had to go."""
        while True:
            try:
                self.world.write(row, tokens)
                return True
            except OutOfPagesError as error:
                self.counts["out of pages"] += 1
                freed = self.world.cache.evict(error.wanted - error.free, error.group)
                self.counts["evicted"] += freed
                if freed:
                    continue
            youngest = self.world.table.rows[-1]
            self.counts["preempted"] += 1
            request = self.world.requests[youngest]
            self.waiting.append((list(request.tokens), request.namespace))
            self.leave(youngest)
            if youngest == row:
                return False

    def leave(self, row: int) -> None:
        del self.targets[row]
        self.world.remove(row)

    def admit(self) -> None:
        tokens, namespace = self.waiting.pop()
        row = self.world.add([*tokens, 0], namespace)
        self.targets[row] = len(tokens) + self.random.randint(1, self.world.page_size + 8)
        self.counts["prefix tokens"] += self.world.table.length(row)
        rest = tokens[self.world.table.length(row) :]
        while rest:  # chunked prefill
            chunk = self.random.randint(1, 3 * self.world.page_size)
            if not self.room(row, rest[:chunk]):
                return
            self.world.table.slide(row)
            rest = rest[chunk:]
        if self.random.random() < 0.5:
            self.world.insert(row)

    def step(self, row: int) -> None:
        what = self.random.random()
        if what < 0.03:
            self.counts["cancelled"] += 1
            self.leave(row)
        elif what < 0.08 and self.world.table.free:
            self.counts["forked"] += 1
            self.targets[self.world.fork(row)] = self.targets[row] + self.random.randint(0, 3)
        elif what < 0.2:  # drafts, of which some are accepted
            drafts = self.random.choices(range(4), k=4)
            if self.room(row, drafts):
                self.world.truncate(row, self.world.table.length(row) - self.random.randint(0, 4))
        elif self.room(row, [self.random.randrange(4)]):
            self.world.table.slide(row)
            if self.world.table.length(row) >= self.targets[row]:
                self.counts["finished"] += 1
                self.world.insert(row)
                self.leave(row)

    def run(self) -> None:
        arrived = steps = 0
        while arrived < REQUESTS or self.waiting or self.targets:
            if arrived < REQUESTS and len(self.waiting) < 4:
                arrived += 1
                self.waiting.append((self.prompt(), self.random.choice([None, None, "adapter"])))
            if self.waiting and self.world.table.free:
                self.admit()
            for row in list(self.targets):
                if row in self.targets:
                    self.step(row)
            self.world.table.flush()
            steps += 1
            if steps % 40 == 0:
                self.world.check()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "page_size, windows, pages",
    [(1, (-1, 7), (60, 40)), (16, (-1,), (30,)), (64, (-1, 100, 30), (28, 14, 10))],
)
def test_two_thousand_requests(page_size, windows, pages):
    soak = Soak(World(page_size, windows, pages, rows=8), seed=page_size)
    soak.run()
    for happened in ("finished", "cancelled", "forked", "preempted", "evicted", "prefix tokens"):
        assert soak.counts[happened] > 50, soak.counts
    soak.world.end()
