"""Times of the backends that serve a request, and how they are told."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

from ..contract.names import parts
from .rows import when

__all__ = ["FAR", "NEAR", "SAME", "Lengths", "Measured", "SimilarRequest", "age", "describe_origin", "ranked", "where"]

Lengths = tuple[int, int, int]
"""Buckets of a call's extent (`polyattn.contract.lengths.Extent`)."""

NEAR, FAR = 4, 16
"""Lengths that were not measured have the choice of the nearest that were, if none is further off than the first
factor: of the request itself, else of one like it. Where there are none, of either by the second factor."""

SAME, SAME_OF_OTHERS = 1.01, 1.025
"""Times nearer than this factor tell nothing apart: in the benchmark on an H200, FlashAttention's kernels through
polyattn and by hand are closer in most rows, and in few of them further apart than 2.5%. And times of another request
than the one that is asked for (`SimilarRequest`), where who is ahead by so little may be behind."""


@dataclasses.dataclass(frozen=True)
class SimilarRequest:
    """The request that was measured, where it is another one than is asked for (`similarity`).

    Attributes:
        fields: of the request, those that are others. off: how far it is, in factors of two. lengths: it was
            measured at. batch: with which the request that is asked for has as much to do.
    """

    fields: Mapping[str, Any]
    off: float
    lengths: Lengths
    batch: Fraction


@dataclasses.dataclass(frozen=True)
class Measured:
    """Times of one request at one set of lengths.

    Attributes:
        lengths: in buckets. times: microseconds of the device by backend; with the kernels of another of its libraries
            by NAME/KIND (`polyattn.selection.aliases`). date: ISO 8601, UTC.
        shipped: measured by the authors of a plugin on such a device, not on this machine.
        host: microseconds until a call returns, by backend, where that was measured. rule: who is chosen without
            measurements; "" where that was not written down.
        by: whose kernels they are (`polyattn.selection.aliases.kind_of`), by backend, where that was written down.
        kin: whose times these are, where they are not of the request itself.
        late: backends that have no time because there was none left to measure them in.
        predicted: what these times were predicted from (`predicted.Model`), in words; "" = they were measured.
    """

    lengths: Lengths
    times: Mapping[str, float]
    date: str
    shipped: bool = False
    host: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rule: str = ""
    by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kin: SimilarRequest | None = None
    late: tuple[str, ...] = ()
    predicted: str = ""

    def costs(self, *, recorded: bool) -> dict[str, float]:
        """Microseconds by backend, who is to be chosen first. The host issues a call while the device works on those
        before it, so the slower of both counts; a `recorded` one is issued with its graph."""
        found = {
            name: self._cost(time, 0.0 if recorded else self.host.get(name, 0.0)) for name, time in self.times.items()
        }
        return ranked(found, self.rule, own=self.kin is None and not self.predicted)

    def _cost(self, time: float, host: float) -> float:
        """Of a call. Predictions are off by tens of percent, and so is the host from call to call: where it takes about
        as long as the device, the slower of both is slower than either is said to be."""
        return math.hypot(time * time, host * host) ** 0.5 if self.predicted else max(time, host)

    def without(self, held: Collection[str]) -> dict[str, float]:
        """The times of those who are not quarantined, by their own name or their backend's."""
        return {name: time for name, time in self.times.items() if not {self._whole(name), parts(name)[0]} & {*held}}

    def _whole(self, name: str) -> str:
        """NAME/KIND where that was written down."""
        return f"{name}/{self.by[name]}" if name in self.by else name

    def why(self, backend: str) -> str:
        """The figures behind a choice, and how old they are."""
        beside = ", ".join(f"{name} {self._took(name)}" for name in self.times if name != backend)
        batch, s_q, s_k = self.lengths if self.kin is None else self.kin.lengths
        if self.predicted:
            took = f"predicted {self._took(backend)}{f' against {beside}' if beside else ''}"
        else:
            took = f"{self._took(backend)}{f' (others: {beside})' if beside else ''}"
        return f"{took} at batch {batch}, S_q {s_q}, S_k {s_k}, {where(self)}{describe_origin(self.kin)}"

    def _took(self, backend: str) -> str:
        time, host = self.times[backend], self.host.get(backend, 0.0)
        took = f"{_us(time)}, {_us(host)} of the host" if host > SAME * time else _us(time)
        return f"{took} with {self.by[backend]}" if backend in self.by else took


def ranked(costs: Mapping[str, float], rule: str, *, own: bool) -> dict[str, float]:
    """Sort backends by cost. The one that the rules choose stays first unless another is faster by more than `SAME`
    (`SAME_OF_OTHERS` if it is not this request's `own` times)."""
    least = (SAME if own else SAME_OF_OTHERS) * min(costs.values(), default=0.0)
    kept = rule if costs.get(rule, math.inf) <= least else ""
    return dict(sorted(costs.items(), key=lambda item: (item[0] != kept, item[1], item[0])))


def where(one: Measured) -> str:
    """Return where the times are from, or how old they are, in words."""
    if one.predicted:
        return one.predicted
    return "shipped with a plugin" if one.shipped else f"measured {age(one.date)}"


def describe_origin(kin: SimilarRequest | None) -> str:
    """Name the request that was measured, in words, if the times are of another one."""
    if kin is None:
        return ""
    return f", of a request like this one with {', '.join(f'{name}={value!r}' for name, value in kin.fields.items())}"


def _us(time: float) -> str:
    return f"{time:.3g} us" if time < 1000 else f"{time / 1000:.3g} ms"


def age(date: str) -> str:
    """How long ago it was, in words."""
    try:
        then = when(date)
    except ValueError:
        return f"on {date}"
    days = (datetime.datetime.now(datetime.timezone.utc) - then).days
    if days < -1:  # a clock that is ahead, or a date that is none
        return f"on {date}"
    return "today" if days < 1 else f"{days} day{'s' if days > 1 else ''} ago"
