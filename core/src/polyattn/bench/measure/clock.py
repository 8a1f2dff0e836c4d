"""Time on a device: of calls one by one, and of a recorded graph of them. By the device's own events, or on the CPU by
its clock."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

__all__ = ["OF_ROUNDS", "ROUNDS", "Clock", "Time", "Timing", "interleaved", "made_current"]

ROUNDS, _ROUNDS_LEAST, _ROUNDS_WITHIN = 9, 3, 12.0
"""How often everybody is timed; after so many seconds no other round begins, the least number of them apart.

A GPU at the limit of its power runs as fast as the last tenth of a second allows, so a window of one entry depends on
who ran before it, by up to 10%. Many short windows in ever other orders meet everybody in the same states; few long
ones do not."""
OF_ROUNDS = "interquartile mean"
"""What counts of their times (`Time.over`)."""
_WARM, _WARM_MOST = 0.4, 0.025
"""Work before the first time that counts: a share of the window, and seconds."""
_FEWEST, _MOST = 5, 200
_LONG, _LONGER_FROM = 3, 0.1
"""Times taken of a call that is longer than the whole budget, the one that said so among them; of one that takes so
many seconds, which is a window in itself and needs no warm-up, two."""
_FAR, _NEAR = 4, 1.1
"""Times slower than the fastest, and nobody asks how much exactly; and so close that it matters."""
_ORDERS = 32
"""Orders that one of a round is picked from."""
_SETTLED, _AGAIN = 0.02, 2
"""Rounds of whoever is near that differ by more (their interquartile range) are as many again, and so often at most."""
_ISSUE_CYCLES = 400_000
"""Device cycles, about 0.2 ms, in which the host issues one call: calls are issued ahead of the device, so that what
the host costs is not in the times."""
_ISSUE_RATE, _ISSUE_MOST = 2.5e9, 40_000_000
"""Device cycles for a second of a host that takes longer, a quarter more than a device of today has; and the most."""


@contextlib.contextmanager
def made_current(device: torch.device) -> Iterator[None]:
    """The device that events are recorded on, graphs are made of and libraries look at, whichever it was before."""
    if device.type == "cpu" or device.index is None:
        yield
        return
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of one call, the median; spread: interquartile range over the median; count: times taken.

    Of several rounds, the interquartile mean of theirs, and the middle of their spreads. rounds: how many. between:
    interquartile range of their medians over the middle of these, None where one has no other.
    """

    seconds: float
    spread: float
    count: int
    rounds: int = 1
    between: float | None = None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Time:
        low, middle, high = statistics.quantiles(seconds, n=4)
        return cls(middle, (high - low) / middle, len(seconds))

    @classmethod
    def over(cls, rounds: Sequence[Time]) -> Time:
        """Several rounds as one.

        At the limit of a GPU's power rounds that are steady in themselves are far apart (`between`). Where half of them
        are slow, which half the median is of is a toss; a mean is no toss, and of the middle half it has no
        interruptions.
        """
        medians = [one.seconds for one in rounds]
        between = cls.of(medians).spread if len(rounds) > 1 else None
        spread = statistics.median(one.spread for one in rounds)
        return cls(_midmean(medians), spread, sum(one.count for one in rounds), len(rounds), between)


def _midmean(values: Sequence[float]) -> float:
    """The interquartile mean; of three or four, without the least and the greatest."""
    ends = max(len(values) / 4, 1.0) if len(values) > 2 else 0.0
    # The share of a value, in their order, that is between the quartiles.
    shares = [min(max(min(number, len(values) - 1 - number) + 1 - ends, 0.0), 1.0) for number in range(len(values))]
    # A failed candidate has infinite time; it is skipped, since infinity * 0 is NaN.
    return sum(share * value for share, value in zip(shares, sorted(values), strict=True) if share) / sum(shares)


Timing = Callable[[], Time]


def _until_issued(count: int, host: float, least: int) -> int:
    """Device cycles to wait before so many calls, each of so many seconds of the host: the last is issued by then."""
    return min(count * max(least, round(host * _ISSUE_RATE)), _ISSUE_MOST)


class Clock:
    """
    Args:
        device: of the calls. seconds: of measuring for one entry in one round (a window), after the warm-up.
    """

    def __init__(self, device: torch.device, seconds: float = 0.03) -> None:
        self.device, self.seconds, self.on_gpu = device, seconds, device.type == "cuda"
        self._warm = min(_WARM * seconds, _WARM_MOST)

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        elif self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def calls(self, calls: Sequence[Callable[[], Any]]) -> Time:
        """Time calls one by one, in turn."""
        if not self.on_gpu:
            return self._on_host(calls)
        count, once, host, taken = self._counts(calls[0])
        for _ in range(round(self._warm / (once * len(calls)))):
            for call in calls:
                call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_until_issued(count, host, _ISSUE_CYCLES))  # type: ignore[no-untyped-call]
        for number, (start, end) in enumerate(events):
            start.record()
            calls[number % len(calls)]()
            end.record()
        self.synchronise()
        return Time.of([*taken, *(start.elapsed_time(end) / 1e3 for start, end in events)])

    def issues(self, calls: Sequence[Callable[[], Any]]) -> Time:
        """Time the host alone: until a call returns, which nobody waits for. Where a device has no queue that is all of
        it.

        Args:
            calls: each is issued once; few, so that no queue is full.
        """
        seconds: list[float] = []
        for call in calls:
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        self.synchronise()
        return Time.of(seconds)

    def graph(self, calls: Sequence[Callable[[], Any]]) -> tuple[Timing, list[Any]]:
        """Record the calls, one after another, and replay them once. Without device graphs they are timed one by one.

        Returns:
            What times a call as a share of a replay, and the results of the calls, which every replay writes anew.
        """
        if not self.on_gpu:
            return lambda: self._on_host(calls), [call() for call in calls]
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for call in (*calls, *calls[:2]):
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call() for call in calls]
        graph.replay()
        self.synchronise()
        return lambda: self._replays(graph, len(calls)), results

    def _replays(self, graph: torch.cuda.CUDAGraph, calls: int) -> Time:
        count, once, host, taken = self._counts(graph.replay)
        for _ in range(round(self._warm / once)):
            graph.replay()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_until_issued(count, host, _ISSUE_CYCLES // 8))  # type: ignore[no-untyped-call]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        self.synchronise()
        replays = [*taken, *(start.elapsed_time(end) / 1e3 for start, end in events)]
        return Time.of([seconds / calls for seconds in replays])

    def _counts(self, run: Callable[[], Any]) -> tuple[int, float, float, list[float]]:
        """(times to take, about what one takes, and its host, those that were taken already). Both runs that tell are
        warm-up too; of the longest calls both count."""
        (first, _), (once, host) = self._once(run), self._once(run)
        if min(first, once) >= _LONGER_FROM:
            return 0, once, host, [first, once]
        if once > self.seconds:
            return _LONG - 1, once, host, [once]
        return min(max(round(self.seconds / once), _FEWEST), _MOST), once, host, []

    def _once(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of one run, waited for, and of the host until it was issued."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        began = time.perf_counter()
        run()
        host = time.perf_counter() - began
        end.record()
        self.synchronise()
        return float(start.elapsed_time(end)) / 1e3, host

    def _on_host(self, calls: Sequence[Callable[[], Any]]) -> Time:
        """Time by the host's clock, waiting for the device at both ends of each call."""
        start = time.perf_counter()
        calls[0]()
        self.synchronise()
        # What takes longer than all the time there is tells in two calls how slow it is.
        fewest = _FEWEST if time.perf_counter() - start < self.seconds else 2
        seconds: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(seconds) < fewest or (len(seconds) < _MOST and time.perf_counter() < end):
            start = time.perf_counter()
            calls[len(seconds) % len(calls)]()
            self.synchronise()
            seconds.append(time.perf_counter() - start)
        return Time.of(seconds)


_N = TypeVar("_N")


def interleaved(
    timings: Mapping[_N, Timing],
    rounds: int = ROUNDS,
    late: Callable[[], bool] = lambda: False,
    *,
    settle: bool = False,
    strict: bool = False,
) -> dict[_N, Time]:
    """Time several entries in rounds, each of which times all of them: a drift of the clock meets everybody alike.

    Whoever is far slower than the fastest in the first round is not in the others.

    Args:
        late: whether the time is up; then the round is finished and no other begun.
        rounds: of each; fewer where they take long (`_ROUNDS_WITHIN`).
        settle: those near the fastest have more rounds while theirs differ: one kernel under two names was found 5%
            apart in nine rounds of 3 ms calls, at the limit of a GPU's power.
        strict: nor is anything of the first round begun then: whoever it did not reach is not in what is returned.
    """
    began = time.monotonic()
    found: dict[_N, list[Time]] = {}
    for name, timing in timings.items():
        if strict and late():
            break
        found[name] = [timing()]
    fastest = min((times[0].seconds for times in found.values()), default=0.0)
    close = [name for name, times in found.items() if times[0].seconds <= _FAR * fastest]
    orders = _Orders(found)
    most = rounds * (1 + _AGAIN) if settle and rounds > 1 else rounds
    for number in range(1, most):
        if not close or late() or (number >= _ROUNDS_LEAST and time.monotonic() - began > _ROUNDS_WITHIN):
            break
        if number % rounds == 0:
            close = _unsettled({name: found[name] for name in close})
        for name in orders.next(close):
            found[name].append(timings[name]())
    return {name: Time.over(times) for name, times in found.items()}


class _Orders:
    """Ever other orders, always the same ones, in which everybody comes after everybody about as often."""

    def __init__(self, first: Iterable[Hashable]) -> None:
        self._dice, self._last = random.Random(0), list[Any]()
        self._followed: Counter[tuple[Any, Any]] = Counter()
        self._take(list(first))

    def next(self, names: Sequence[_N]) -> list[_N]:
        """The next one of these."""
        some = [self._dice.sample(names, len(names)) for _ in range(_ORDERS)]
        return self._take(min(some, key=lambda order: sum(self._followed[pair] for pair in self._pairs(order))))

    def _take(self, order: list[_N]) -> list[_N]:
        self._followed.update(self._pairs(order))
        self._last = order[-1:]
        return order

    def _pairs(self, order: Sequence[_N]) -> Iterable[tuple[Any, Any]]:
        return itertools.pairwise([*self._last, *order])


def _unsettled(found: Mapping[_N, Sequence[Time]]) -> list[_N]:
    """Return the candidates near the fastest, if the rounds of one of them differ; else none."""
    middle = {name: Time.over(times).seconds for name, times in found.items()}
    near = [name for name in found if middle[name] <= _NEAR * min(middle.values())]
    settled = all(Time.of([one.seconds for one in found[name]]).spread <= _SETTLED for name in near)
    return [] if settled or len(near) < 2 else near
