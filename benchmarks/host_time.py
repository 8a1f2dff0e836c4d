"""Host time of calls beside one another, for the benchmarks of what a call costs beyond its kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["added", "interleaved"]


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int, count: int, settle: Callable[[], Any] = lambda: None
) -> dict[str, list[float]]:
    """Microseconds per call, one figure per round and name; the order rotates. settle: between them, not timed."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            call = calls[name]
            start = time.perf_counter_ns()
            for _ in range(count):
                call()
            found[name].append((time.perf_counter_ns() - start) / count / 1000)
            settle()
    return found


def added(times: Mapping[str, list[float]], base: str) -> dict[str, dict[str, Any]]:
    """Per name: median call, median of what it adds to `base`, and its interquartile range, round by round."""
    rows = {}
    for name, values in times.items():
        extra = sorted(a - b for a, b in zip(values, times[base], strict=True))
        low, _, high = statistics.quantiles(extra, n=4)
        rows[name] = {"call": statistics.median(values), "added": statistics.median(extra), "spread": high - low}
    return rows
