"""Which backend was fastest for a request at the lengths that were measured, and which must not be chosen for it.

Everything is read from the store once and kept in memory; nothing here measures, and nothing imports torch.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.resources
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from ..records import AttentionRequest
from ..request_text import plain_request
from .current import cached, mode, store
from .kernels import bucket
from .rows import BACKEND, Place, Row, canonical, row_of, when
from .store import FORMAT

__all__ = [
    "NEAR",
    "SAME",
    "Advice",
    "Lengths",
    "Measured",
    "advise",
    "backend_row",
    "measured",
    "meet",
    "request_key",
    "shipped_advice",
    "with_lengths",
]

Lengths = tuple[int, int, int]
"""Buckets of (B or N, the longest S_q, the longest S_k)."""

NEAR = 4
"""Lengths that were not measured have the choice of the nearest that were, if none is further off than this factor."""

SAME = 1.025
"""Times nearer than this factor tell nothing apart: on an H200, two measurements of one kernel, by the tuner and by the
benchmark, differed by 0.7%, one pair of seven by 2.3%."""

_WHERE = {"platform", "arch", "toolkit", "features"}
"""Fields that say which machine it is: the place of a measurement does."""
_FREE = {"options", "graph_capture", "batch_bucket", "q_bucket", "k_bucket"}
"""Fields that do not tell one measurement from another. A recorded call runs the kernel of the one that is not."""
_SWITCHES = {"scale": None, "softcap": 0.0, "dropout": 0.0}
"""Fields whose value changes nothing but the result, beside this one."""


def request_key(request: AttentionRequest) -> dict[str, Any]:
    """What of a request decides which backend is fast, besides the lengths."""
    found = {name: v for name, v in plain_request(request.normalised()).items() if name not in _WHERE | _FREE}
    return {name: True if name in _SWITCHES else value for name, value in found.items()}


def with_lengths(request: AttentionRequest, batch: int, s_q: int, s_k: int) -> AttentionRequest:
    """The request at lengths of a call: (B or N, the longest S_q, the longest S_k)."""
    return dataclasses.replace(request, batch_bucket=bucket(batch), q_bucket=bucket(s_q), k_bucket=bucket(s_k))


@dataclasses.dataclass(frozen=True)
class Measured:
    """Times of one request at one set of lengths.

    Attributes:
        lengths: in buckets. times: microseconds of the device by backend. date: ISO 8601, UTC.
        shipped: measured by polyattn's authors on such a device, not on this machine.
        host: microseconds until a call returns, by backend, where that was measured. rule: who is chosen without
            measurements; "" where that was not written down.
    """

    lengths: Lengths
    times: Mapping[str, float]
    date: str
    shipped: bool = False
    host: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rule: str = ""

    def costs(self, *, recorded: bool) -> dict[str, float]:
        """Microseconds by backend, who is to be chosen first. The host issues a call while the device works on those
        before it, so the slower of both counts; a `recorded` one is issued with its graph."""
        found = {name: time if recorded else max(time, self.host.get(name, 0.0)) for name, time in self.times.items()}
        return _ranked(found, self.rule)

    def why(self, backend: str) -> str:
        """The figures behind a choice, and how old they are."""
        beside = ", ".join(f"{name} {self._took(name)}" for name in self.times if name != backend)
        batch, s_q, s_k = self.lengths
        where = "shipped with polyattn" if self.shipped else f"measured {_age(self.date)}"
        took = f"{self._took(backend)}{f' (others: {beside})' if beside else ''}"
        return f"{took} at batch {batch}, S_q {s_q}, S_k {s_k}, {where}"

    def _took(self, backend: str) -> str:
        time, host = self.times[backend], self.host.get(backend, 0.0)
        return f"{_us(time)}, {_us(host)} of the host" if host > SAME * time else _us(time)


def _ranked(costs: Mapping[str, float], rule: str) -> dict[str, float]:
    """What costs least first; before it what is chosen anyway, where nothing is faster by more than `SAME`."""
    least = SAME * min(costs.values(), default=0.0)
    kept = rule if costs.get(rule, math.inf) <= least else ""
    return dict(sorted(costs.items(), key=lambda item: (item[0] != kept, item[1], item[0])))


@dataclasses.dataclass(frozen=True)
class Advice:
    """What measurements have to say on a request.

    Attributes:
        order: (backend, why), the fastest first. avoid: backends that are quarantined for it.
        notes: what else a reader should know: who is quarantined and why, which measurements are not used.
    """

    order: tuple[tuple[str, str], ...] = ()
    avoid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


NOTHING = Advice()


@dataclasses.dataclass(frozen=True)
class _Known:
    """Everything in the store about backends, by the text of `request_key`."""

    here: Mapping[str, Sequence[Measured]] = dataclasses.field(default_factory=dict)
    elsewhere: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    quarantined: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)


def backend_row(
    place: Place,
    request: AttentionRequest,
    lengths: Lengths,
    times: Mapping[str, float],
    source: str,
    *,
    host: Mapping[str, float] | None = None,
    rule: str = "",
) -> Row:
    """A measurement as it is recorded. times, host: microseconds by backend. rule: as `Measured`."""
    batch, s_q, s_k = lengths
    key = {"request": request_key(request), "batch": batch, "q": s_q, "k": s_k}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")
    costs = Measured(lengths, times, now, host=host or {}, rule=rule).costs(recorded=bool(request.graph_capture))
    best = next(iter(costs))
    value: dict[str, Any] = {"backend": best, "times": {name: times[name] for name in costs}}
    if host:
        value["host"] = {name: host[name] for name in costs if name in host}
    if rule:
        value["rule"] = rule
    return Row(place, BACKEND, key, value, times[best], now, source)


def measured(request: AttentionRequest, place: Callable[[], Place]) -> Sequence[Measured]:
    """All measurements of a request on this device, of any lengths; those of this machine before shipped ones."""
    known = _known(request, place)
    return () if known is _EMPTY else known.here.get(canonical(request_key(request)), ())


def advise(request: AttentionRequest, place: Callable[[], Place]) -> Advice:
    """What to choose for a request.

    Args:
        request: with lengths in its buckets, or without: then what is fastest over all that were measured.
        place: of measurements on this device; asked only where there are any.
    """
    known = _known(request, place)
    if known is _EMPTY:
        return NOTHING
    key = canonical(request_key(request))
    held = known.quarantined.get(key, {})
    notes = [
        f"{name} is quarantined for such requests: {reason}; `polyattn tune --release {name}` lets it be chosen again"
        for name, reason in held.items()
    ]
    found = known.here.get(key, ())
    if not found and (others := known.elsewhere.get(key)):
        notes.append(f"{len(others)} measurements of such requests are not used: {'; '.join(dict.fromkeys(others))}")
    return Advice(tuple((n, why) for n, why in _order(request, found) if n not in held), tuple(held), tuple(notes))


def shipped_advice(request: AttentionRequest, place: Callable[[], Place]) -> Advice:
    """What the tables that come with polyattn say, as where nothing was measured. Arguments as `advise`."""
    found = _tables(place()).get(canonical(request_key(request)), {}) if _shipped() else {}
    return Advice(tuple(_order(request, tuple(found.values()))))


def _order(request: AttentionRequest, found: Sequence[Measured]) -> list[tuple[str, str]]:
    lengths, recorded = (request.batch_bucket, request.q_bucket, request.k_bucket), bool(request.graph_capture)
    return _near(found, lengths, recorded) if any(lengths) else _overall(found, recorded)


def _near(found: Sequence[Measured], lengths: Lengths, recorded: bool) -> list[tuple[str, str]]:
    """The order at the nearest lengths that were measured."""
    off = [(distance, i) for i, m in enumerate(found) if (distance := _distance(m.lengths, lengths)) is not None]
    if not off:
        return []
    best = found[min(off)[1]]
    return [(name, best.why(name)) for name in best.costs(recorded=recorded)]


def _distance(a: Lengths, b: Lengths) -> float | None:
    """In factors of two, added up; None where one length is further off than `NEAR`."""
    if 0 in (*a, *b):
        return 0.0 if a == b else None
    off = [abs(math.log2(x / y)) for x, y in zip(a, b, strict=True)]
    return sum(off) if max(off) <= math.log2(NEAR) else None


def meet(a: Lengths, b: Lengths) -> bool:
    """Whether there are lengths that both of these are near."""
    return all(max(x, y) <= NEAR * NEAR * min(x, y) for x, y in zip(a, b, strict=True))


def _overall(found: Sequence[Measured], recorded: bool) -> list[tuple[str, str]]:
    """The order where lengths are not known: by the geometric mean of what each loses to the fastest."""
    if len(found) == 1:
        return [(name, found[0].why(name)) for name in found[0].costs(recorded=recorded)]
    costs = [m.costs(recorded=recorded) for m in found]
    names = [name for name in (costs[0] if costs else ()) if all(name in one for one in costs)]
    losses = {
        name: math.exp(sum(math.log(one[name] / min(one.values())) for one in costs) / len(costs)) for name in names
    }
    rules = {m.rule for m in found}
    ranked = _ranked(losses, rules.pop() if len(rules) == 1 else "")
    dates = min((m.date for m in found), default="")
    return [
        (name, f"{losses[name]:.2f} x the fastest over {len(found)} measured lengths, measured {_age(dates)}")
        for name in ranked
    ]


def _us(time: float) -> str:
    return f"{time:.3g} us" if time < 1000 else f"{time / 1000:.3g} ms"


def _age(date: str) -> str:
    try:
        then = when(date)
    except ValueError:
        return f"on {date}"
    days = (datetime.datetime.now(datetime.timezone.utc) - then).days
    return "today" if days < 1 else f"{days} day{'s' if days > 1 else ''} ago"


# ------------------------------------------------------------------------------------------------------------- reading

_EMPTY = _Known()


def _known(request: AttentionRequest, place: Callable[[], Place]) -> _Known:
    if mode() == "off":
        return _EMPTY
    return cached(("backends", request.platform, request.arch), lambda: _read(place))


def _read(place: Callable[[], Place]) -> _Known:
    try:
        rows, held = store().rows(subject=BACKEND), store().quarantined()
    except ConfigError as exc:
        warnings.warn(f"nothing measured decides about backends: {exc}", RuntimeWarning, stacklevel=6)
        rows, held = [], []
    shipped = _shipped()
    if not (rows or held or shipped):
        return _EMPTY
    here = place()
    found = _tables(here)
    elsewhere: dict[str, list[str]] = {}
    for row in rows:
        if row.place == here:
            _keep(found, row, shipped=False)
        else:
            elsewhere.setdefault(_key(row), []).append(f"of {here.differs(row.place)}, which this machine has not")
    quarantined: dict[str, dict[str, str]] = {}
    for one in held:
        if one.place == here:
            quarantined.setdefault(canonical(one.key), {})[one.backend] = one.reason
    own = {key: tuple(by_lengths.values()) for key, by_lengths in found.items()}
    return _Known(own, elsewhere, quarantined) if own or elsewhere or quarantined else _EMPTY


def _tables(here: Place) -> dict[str, dict[Lengths, Measured]]:
    """What polyattn's authors measured on such a device."""
    found: dict[str, dict[Lengths, Measured]] = {}
    for row in _shipped():
        if (row.place.device, row.place.arch) == (here.device, here.arch):
            _keep(found, row, shipped=True)
    return found


def _keep(found: dict[str, dict[Lengths, Measured]], row: Row, *, shipped: bool) -> None:
    lengths = (row.key["batch"], row.key["q"], row.key["k"])
    host, rule = row.value.get("host", {}), row.value.get("rule", "")
    found.setdefault(_key(row), {})[lengths] = Measured(lengths, row.value["times"], row.date, shipped, host, rule)


def _key(row: Row) -> str:
    return canonical(row.key["request"])


def _shipped() -> list[Row]:
    """The tables that come with the package, one file for each device."""
    return cached(("shipped",), lambda: list(_shipped_rows()))


def _shipped_rows() -> Iterable[Row]:
    for file in sorted(importlib.resources.files(__package__).joinpath("shipped").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            data = json.loads(file.read_text(encoding="utf-8"))
            if data.get("format") != FORMAT:
                raise ConfigError(f"{file.name}: this is no export of measurements; one has format {FORMAT!r}")
            yield from (row_of(one, f"{file.name}: measurement {i}") for i, one in enumerate(data["measurements"]))
