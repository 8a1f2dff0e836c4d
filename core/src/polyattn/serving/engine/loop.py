"""This module runs an engine on a thread of its own, so that requests may come and go while it steps."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from ...errors import BusyError, InvalidInputError
from .engine import Engine, Output
from .media import Media
from .sampling import SamplingParams

__all__ = ["Counts", "EngineLoop", "Tell", "Ticket", "Update"]


@dataclasses.dataclass(frozen=True)
class Update:
    """Says what is new of a request: tokens, and at its end the output or the error that ended it."""

    tokens: list[int]
    output: Output | None = None
    error: BaseException | None = None


Tell = Callable[[Update], None]
Hand = Callable[[list[tuple[Tell, Update]]], None]


@dataclasses.dataclass(eq=False)
class Ticket:
    """Stands for a request that was handed in. `id`: of the engine's request, -1 before it has one. `told`: tokens
    that were told so far. `gone`: how it ended where it was stopped from outside."""

    prompt: Sequence[int]
    params: SamplingParams
    tell: Tell
    media: Media | None = None
    id: int = -1
    told: int = 0
    gone: str = ""


@dataclasses.dataclass
class Counts:
    """Counts what an engine has done since it started: tokens of prompts, those of them that were found in the prefix
    cache, tokens that were made, finished requests by how they ended, steps, and steps that failed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ended: dict[str, int] = dataclasses.field(default_factory=dict)
    steps: int = 0
    failed_steps: int = 0


class EngineLoop:
    """Steps an engine as long as there are requests. The engine belongs to its thread from `start` on.

    Args:
        engine: whose requests these are. waiting: requests that may wait beside those that run; more are refused.
        beside: the news of a step are told while a device does the next one, the first token of a request at once, so
            that who tells takes no time from the steps. None = where the engine is on a device.

    Attributes:
        counts: what was done so far. failures: steps that have failed since one that did not. failure: the error of
            the last that failed, or None.

    Example:
        loop = EngineLoop(engine)
        loop.start()
        loop.submit([1, 5, 7], SamplingParams(), print)
        loop.close()
    """

    def __init__(self, engine: Engine, *, waiting: int = 1024, beside: bool | None = None) -> None:
        self.engine, self.most = engine, engine.config.max_requests + waiting
        self._beside = engine.memory.device.type != "cpu" if beside is None else beside
        self._held: list[tuple[Tell, Update]] = []
        self._hand: Hand = _tell_all
        self.counts = Counts()
        self.failures = 0
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Ticket] = set()
        self._live: dict[int, Ticket] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="polyattn-engine", daemon=True)

    def start(self, hand: Hand | None = None) -> None:
        """Start the thread.

        Args:
            hand: given the news of a step, all at once, on the loop's thread; it has to call each `tell` with its
                update, on whatever thread. None = here and now.
        """
        self._hand = hand or _tell_all
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether requests are taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def unfinished(self) -> int:
        """Return how many requests are not finished, those that wait included."""
        return len(self._open)

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, tell: Tell, *, media: Media | None = None
    ) -> Ticket:
        """Hand a request in.

        Args:
            prompt: token ids. tell: called with each `Update`; the last one has an output or an error. media: the
                images of the prompt.

        Raises:
            InvalidInputError: as `Engine.add`. BusyError: as many requests wait as may, or the loop is closing.
        """
        self.engine.check_request(prompt, params, media)
        ticket = Ticket(prompt, params, tell, media)
        with self._lock:
            if self._closing or not self._thread.is_alive():
                raise BusyError("the engine takes no more requests: it is shutting down; ask another server", False)
            if len(self._open) >= self.most:
                raise BusyError(
                    f"{len(self._open)} requests run or wait, and no more than {self.most} may; ask again later"
                )
            self._open.add(ticket)
        self._inbox.put(ticket)
        return ticket

    def cancel(self, ticket: Ticket, how: str = "cancelled") -> None:
        """Stop a request before the next step. One that has ended stays as it is.

        Args:
            how: it counts as ended so.
        """
        ticket.gone = ticket.gone or how
        self._inbox.put(ticket)

    def close(self, seconds: float | None = None) -> None:
        """Take no more requests, wait for those that are there, and end the thread.

        Args:
            seconds: those that take longer are cancelled; None = as long as it takes.
        """
        with self._lock:
            self._closing = True
        self._inbox.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            for ticket in list(self._open):
                self.cancel(ticket)
            self._thread.join()

    # On the loop's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        device = self.engine.memory.device
        if device.index is not None and device.type != "cpu":
            torch.accelerator.set_device_index(device.index)  # each thread has a device of its own, 0 at first
        while self._take_in():
            news: list[tuple[Tell, Update]]
            late = self._beside
            first = {number for number, ticket in self._live.items() if not ticket.told}
            try:
                outputs = self.engine.step(self._tell_held if self._held else None)
            except Exception as exc:  # noqa: BLE001 - a device's or the model's: others go on
                news, late = self._failed(exc), False
            else:
                self.failures = 0
                news = self._news(outputs)
            self.counts.steps += 1
            self._held += news
            if not late or not self._live or not first.isdisjoint(self.engine.stepped):
                self._tell_held()

    def _tell_held(self) -> None:
        news, self._held = self._held, []
        if news:
            self._hand(news)

    def _take_in(self) -> bool:
        """Take in what has come, and wait where there is nothing to do. False: there never will be."""
        while True:
            idle = not self._live
            if idle and self._closing and self._inbox.empty():
                return False
            try:
                ticket = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if ticket is not None:
                self._admit(ticket)

    def _admit(self, ticket: Ticket) -> None:
        """Add a request that is new, or cancel one that is not wanted any more."""
        if not ticket.gone:
            try:
                (ticket.id,) = self.engine.add(ticket.prompt, ticket.params, media=ticket.media)
            except InvalidInputError as exc:  # it was fine when it was handed in
                self._end(ticket, "error")
                self._hand([(ticket.tell, Update([], error=exc))])
            else:
                self._live[ticket.id] = ticket
        elif ticket in self._open:
            if self._live.get(ticket.id) is ticket:
                self.engine.cancel(ticket.id)
            self._end(ticket, ticket.gone)

    def _news(self, outputs: Sequence[Output]) -> list[tuple[Tell, Update]]:
        news = []
        for output in outputs:
            ticket = self._live[output.id]
            tokens = output.token_ids[ticket.told :]
            self._count(ticket, len(tokens), output)
            self._end(ticket, output.finish_reason)
            news.append((ticket.tell, Update(tokens, output)))
        for stepped in self.engine.stepped:
            live = self._live.get(stepped)
            if live is not None and (tokens := self.engine.tokens_of(stepped, live.told)):
                self._count(live, len(tokens))
                news.append((live.tell, Update(tokens)))
        return news

    def _count(self, ticket: Ticket, tokens: int, output: Output | None = None) -> None:
        ticket.told += tokens
        self.counts.generated_tokens += tokens
        if output is not None:
            self.counts.prompt_tokens += len(output.prompt)
            self.counts.cached_tokens += output.cached_tokens

    def _failed(self, exc: Exception) -> list[tuple[Tell, Update]]:
        """End the requests that a failed step ran; all of them where it came to none."""
        self.failure = exc
        self.failures += 1
        self.counts.failed_steps += 1
        hit = [self._live[i] for i in self.engine.stepped if i in self._live] or list(self._live.values())
        for ticket in hit:
            self.engine.cancel(ticket.id)
            self._end(ticket, "error")
        return [(ticket.tell, Update([], error=exc)) for ticket in hit]

    def _end(self, ticket: Ticket, how: str) -> None:
        self._live.pop(ticket.id, None)
        self.counts.ended[how] = self.counts.ended.get(how, 0) + 1
        with self._lock:
            self._open.discard(ticket)


def _tell_all(news: list[tuple[Tell, Update]]) -> None:
    for tell, update in news:
        tell(update)
