"""This module decides which requests run in the next step. When pages run out the prefix cache gives way first, then
the youngest request."""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from ...errors import OutOfPagesError
from ..memory import Memory
from .media import Media
from .sampling import SamplingParams

__all__ = ["Request", "Scheduler", "Work"]


@dataclasses.dataclass(eq=False)
class Request:
    """Holds one output in the making.

    Attributes:
        tokens: prompt and output. number: which sample of its prompt it is; numbers: where theirs come from.
        namespace: prefixes are shared within it only.
        row: in the request table while it runs, else -1. draft_row: the same for the draft model.
        cached: tokens that were found in the prefix cache. preemptions: how often it was sent back to the line.
        siblings: samples of the same prompt that wait for its prefill, to fork from it; till then it is their `parent`.
        backends: phase -> backend, of the phases it has been through.
        media: the images of its prompt.
    """

    id: int
    tokens: list[int]
    prompt_tokens: int
    params: SamplingParams
    numbers: Iterator[int]
    number: int = 0
    namespace: Hashable = None
    row: int = -1
    draft_row: int = -1
    cached: int = 0
    preemptions: int = 0
    siblings: list[Request] = dataclasses.field(default_factory=list)
    parent: Request | None = None
    backends: dict[str, str] = dataclasses.field(default_factory=dict)
    media: Media | None = None

    @property
    def keys(self) -> Sequence[int]:
        """Its tokens, as the prefix cache knows them."""
        return self.tokens if self.media is None else [*self.media.keys, *self.tokens[self.prompt_tokens :]]


@dataclasses.dataclass(frozen=True)
class Work:
    """`count` tokens of a request that have slots now, from `start` on; `last`: the next token comes out of them.
    `drafts`: that many slots beyond its tokens are there for drafts."""

    request: Request
    start: int
    count: int
    last: bool
    drafts: int = 0


class Scheduler:
    """First come, first served, with chunked prefill under one token budget per step.

    Args:
        memory: of the target model. budget: tokens per step. drafts: slots a decoding request needs beyond one.
        released: called with a request that loses its row.
        draft_until: tokens of the longest request that drafts are made for, None = any: those after it would be at
            positions that a model does not know.
        piece: 0 = prompts are cut as the budget allows. Else they are cut at multiples of so many tokens, whatever else
            runs, and a request that lost its pages makes its own tokens anew one by one, as it made them first: the
            calls that its tokens are in are then the same in every schedule.

    Attributes:
        waiting, running: by age; the last of those that run is the first to go.
    """

    def __init__(
        self,
        memory: Memory,
        budget: int,
        drafts: int,
        released: Callable[[Request], None],
        draft_until: int | None = None,
        piece: int = 0,
    ) -> None:
        self.memory, self.table = memory, memory.table
        self.budget, self.drafts, self._released, self._draft_until = budget, drafts, released, draft_until
        self._piece = piece
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._works: dict[Request, Work] = {}
        self._left = self._stuck_left = 0
        # Who could not start, with what there was and so many tokens of the budget left.
        self._stuck: tuple[Request, Hashable] | None = None

    def schedule(self) -> list[Work]:
        """The work of the next step; every token of it has a slot. Empty: nothing waits and nothing runs.

        Those who decode come first, so that a long prompt delays nobody's next token; of each kind the oldest first.
        """
        self._works, self._left = {}, self.budget
        running = len(self.running)
        going = sorted(self.running, key=lambda request: self._pending(request) > 1)
        for request in going:
            if (work := self._plan(request)) is not None:
                self._take(work)
        if not self._extend(list(self._works.values())):
            # Some have to go, and what is left is shared out anew.
            self._works, self._left = {}, self.budget
            for request in going:
                # Those preempted for an older request have no row any more.
                if request.row >= 0:
                    self._continue(request)
        # Who has just lost its pages would only be the first to lose them again; but one that was alone found its way
        # barred by pages it had twice, its own and the cache's, and begins anew with the cache's.
        if len(self.running) == running or not self.running:
            while self.waiting and self.table.free and self._admit(self.waiting[0]):
                pass
        return list(self._works.values())

    def add(self, request: Request) -> None:
        """Put a request in line, by age: a preempted one comes before those that arrived after it."""
        waiting = self.waiting
        if not waiting or waiting[-1].id < request.id:
            waiting.append(request)
        elif request.id < waiting[0].id:
            waiting.appendleft(request)
        else:
            waiting.insert(_place(waiting, request), request)

    def fork(self, parent: Request, child: Request) -> bool:
        """Give a child its parent's pages; where there is no row, or the parent has none, it waits in line instead."""
        if parent.row < 0 or not self.table.free:
            self.add(child)
            return False
        child.row = self.table.fork(parent.row)
        child.cached = self.table.length(child.row)
        self._enter(child)
        return True

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and give its pages back."""
        if request.row >= 0:
            self.running.remove(request)
            self._close(request)
        elif request.parent is not None:
            request.parent.siblings.remove(request)
        else:
            del self.waiting[_place(self.waiting, request)]

    def lengths(self) -> dict[Request, int]:
        """Return how many tokens of each running request have a slot."""
        return dict(zip(self.running, self.table.lengths(request.row for request in self.running), strict=True))

    def undo(self, before: Mapping[Request, int]) -> None:
        """After a step that failed: who was given slots in it loses its row and goes back to the line. What is in the
        row's pages is not known, so that nothing of it is remembered.

        Args:
            before: the `lengths` when the step began.
        """
        for request in [*self.running, *self.waiting]:
            if request.row >= 0 and self.table.length(request.row) != before.get(request):
                self._drop(request)

    def forget(self) -> None:
        """Use nothing that was computed: who runs goes back to the line with its tokens, and nothing is remembered."""
        for request in list(self.running):
            self._drop(request)
        if self.memory.prefixes is not None:
            self.memory.prefixes.clear()

    def _drop(self, request: Request) -> None:
        """Take the row of a request, and put it back in line."""
        self.table.remove(request.row)
        request.row = -1
        self._released(request)
        if request in self.running:
            self.running.remove(request)
            self.add(request)

    def _pending(self, request: Request) -> int:
        return len(request.tokens) - self.table.length(request.row)

    def _plan(self, request: Request) -> Work | None:
        """Plan as much work as the budget has left, or None."""
        pending = self._pending(request)
        known = self._draft_until is None or len(request.tokens) <= self._draft_until
        drafts = self.drafts if pending == 1 and known and not request.siblings else 0
        start = self.table.length(request.row)
        count = min(pending, self._left - drafts)
        if self._piece:
            whole = self._together(request, start)
            count = whole if whole <= self._left else 0
        if count < 1:
            return None
        return Work(request, start, count, count == pending, drafts)

    def _together(self, request: Request, start: int) -> int:
        """Tokens from `start` on that run in one step where there are pieces."""
        end = min(start - start % self._piece + self._piece, request.prompt_tokens)
        return max(end - start, 1)

    def _take(self, work: Work) -> None:
        self._works[work.request] = work
        self._left -= work.count + work.drafts

    def _continue(self, request: Request) -> None:
        work = self._plan(request)
        while work is not None and not self._extend([work]):
            victim = self.running[-1]
            if (undone := self._works.pop(victim, None)) is not None:
                # Nobody writes these slots now: they must not be remembered as the keys of its tokens.
                self.table.truncate(victim.row, undone.start)
                self._left += undone.count + undone.drafts
            self._preempt(victim)
            if victim is request:
                return
        if work is not None:
            self._take(work)

    def _admit(self, request: Request) -> bool:
        """Start the request at the head of the line, or leave it there. It takes pages from nobody who runs."""
        state = request, self.memory.supply
        if self.running and state == self._stuck and self._left >= self._stuck_left:
            return False  # as the last time
        request.row = self.memory.begin(request.keys, request.namespace)
        request.cached = self.table.length(request.row)
        work = self._plan(request)
        if work is None or not self._extend([work], start=True):
            # Nothing was computed in the row, and nothing is forgotten for one that cannot start.
            self.table.remove(request.row)
            request.row = -1
            if work is not None:  # pages were wanting, and more tokens would want more; a budget comes anew each step
                self._stuck, self._stuck_left = (request, self.memory.supply), self._left
            return False
        self.waiting.popleft()
        self._enter(request)
        self._take(work)
        return True

    def _extend(self, works: Sequence[Work], *, start: bool = False) -> bool:
        """Slots for work, all or none."""
        rows, counts = [work.request.row for work in works], [work.count + work.drafts for work in works]
        try:
            self.memory.extend(rows, counts, start=start)
        except OutOfPagesError:
            return False
        return True

    def _enter(self, request: Request) -> None:
        """Among those that run, by age."""
        place = len(self.running)
        while place and self.running[place - 1].id > request.id:
            place -= 1
        self.running.insert(place, request)

    def _preempt(self, request: Request) -> None:
        """Back to the line. Its tokens stay, so that nothing is lost; its row is made anew when its turn comes."""
        request.preemptions += 1
        self.remove(request)
        self.add(request)

    def _close(self, request: Request) -> None:
        self.memory.end(request.row, request.keys, request.namespace)
        request.row = -1
        self._released(request)


def _place(waiting: deque[Request], request: Request) -> int:
    """Where a request is in the line, or belongs."""
    return bisect.bisect_left(waiting, request.id, key=lambda other: other.id)
