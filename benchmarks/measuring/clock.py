"""Time on a device, by its own events: of calls one by one, and of a recorded graph of them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Time", "Timer"]

_WARM = 0.025
"""Seconds of work before the first time that counts."""
_FEWEST, _MOST = 5, 200
_ISSUE_CYCLES = 400_000
"""Device cycles, about 0.2 ms, in which the host issues one call: calls are issued ahead of the device, so that what
the host costs is not in the times."""
_ISSUE_MOST = 40_000_000


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of one call, the median; spread: interquartile range over the median; count: times taken."""

    seconds: float
    spread: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Time:
        low, middle, high = statistics.quantiles(seconds, n=4)
        return cls(middle, (high - low) / middle, len(seconds))


class Timer:
    """
    Args:
        device: of the calls; on a CPU each is timed once or twice, to show that it can be.
        budget: seconds of measuring for an entry, after the warm-up.
    """

    def __init__(self, device: torch.device, budget: float) -> None:
        self.device, self.budget, self.on_gpu = device, budget, device.type == "cuda"

    def synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def calls(self, calls: Sequence[Callable[[], Any]]) -> Time:
        """Of calls one by one, in turn."""
        if not self.on_gpu:
            return self._on_cpu(calls)
        count, once = self._counts(lambda: [call() for call in calls], len(calls))
        for _ in range(max(round(_WARM / (once * len(calls))), 1)):
            for call in calls:
                call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda._sleep(min(count * _ISSUE_CYCLES, _ISSUE_MOST))
        for number, (start, end) in enumerate(events):
            start.record()
            calls[number % len(calls)]()
            end.record()
        self.synchronise()
        return Time.of([start.elapsed_time(end) / 1e3 for start, end in events])

    def graph(self, calls: Sequence[Callable[[], Any]]) -> tuple[Callable[[], Time], list[Any]]:
        """Record the calls, one after another, and replay them once.

        Returns:
            What times a call as a share of a replay, and the results of the calls, which every replay writes anew.
        """
        if not self.on_gpu:
            return lambda: self._on_cpu(calls), [call() for call in calls]
        stream = torch.cuda.Stream(self.device)
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
        count, once = self._counts(graph.replay, 1)
        for _ in range(max(round(_WARM / once), 1)):
            graph.replay()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda._sleep(min(count * _ISSUE_CYCLES // 8, _ISSUE_MOST))
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        self.synchronise()
        return Time.of([start.elapsed_time(end) / 1e3 / calls for start, end in events])

    def _counts(self, run: Callable[[], Any], calls: int) -> tuple[int, float]:
        """(times that the budget has room for, about what one takes)."""
        run()
        self.synchronise()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        self.synchronise()
        once = start.elapsed_time(end) / 1e3 / calls
        return min(max(round(self.budget / once), _FEWEST), _MOST), once

    def _on_cpu(self, calls: Sequence[Callable[[], Any]]) -> Time:
        seconds = []
        for call in (calls[0], calls[-1]):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return Time.of(seconds)
