"""This module tells Prometheus what an engine does, by its own client library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from ....serving.engine.loop import EngineLoop

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Reads an engine whenever it is asked.

    Args:
        loop: of the engine.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._first = Histogram(
            "polyattn_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def first(self, seconds: float) -> None:
        """Note the time to a first token."""
        self._first.observe(seconds)

    def text(self) -> bytes:
        """Return the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """Give the families of metrics; the registry asks for them."""
        loop, counts = self._loop, self._loop.counts
        engine = loop.engine
        running = engine.running
        yield _gauge("polyattn_requests_running", "Requests that have pages.", running)
        yield _gauge("polyattn_requests_waiting", "Requests that wait for pages or a place.", loop.unfinished - running)
        pages = GaugeMetricFamily("polyattn_kv_pages", "Pages of the KV cache.", labels=["group", "state"])
        for number, allocator in enumerate(engine.memory.allocators):
            pages.add_metric([str(number), "free"], allocator.free)
            pages.add_metric([str(number), "used"], allocator.capacity - allocator.free)
        yield pages
        for name, what, value in (
            ("prompt_tokens", "Tokens of the prompts of finished requests.", counts.prompt_tokens),
            ("prefix_hit_tokens", "Of these, the ones that were found in the prefix cache.", counts.cached_tokens),
            ("generated_tokens", "Tokens that were made.", counts.generated_tokens),
            ("steps", "Steps of the engine.", counts.steps),
            ("failed_steps", "Steps that raised an error.", counts.failed_steps),
        ):
            yield CounterMetricFamily(f"polyattn_{name}", what, value=value)
        ended = CounterMetricFamily("polyattn_requests", "Requests that ended, and how.", labels=["how"])
        for how, number in dict(counts.ended).items():
            ended.add_metric([how], number)
        yield ended
        backends = InfoMetricFamily("polyattn_backend", "Who serves a phase.", labels=["phase"])
        for phase, backend in engine.backends.items():
            backends.add_metric([phase], {"backend": backend})
        yield backends


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, value=value)
