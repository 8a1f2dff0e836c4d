"""Which backend was fastest for a request at the lengths that were measured, and which must not be chosen for it.

Nothing here measures, and nothing imports torch.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..records import AttentionRequest
from ..request_text import plain_request, read_request
from .kernels import bucket
from .known import NOT_ANY, Known, known, shipped
from .rows import BACKEND, Place, Row, canonical
from .times import Kin, Lengths, Measured, age, ranked, whose

__all__ = [
    "NEAR",
    "NOTHING",
    "Advice",
    "advise",
    "advising",
    "backend_row",
    "measured",
    "meet",
    "request_key",
    "request_of",
    "shipped_advice",
    "with_lengths",
]

NEAR = 4
"""Lengths that were not measured have the choice of the nearest that were, if none is further off than this factor."""

_WHERE = {"platform", "arch", "toolkit", "features"}
"""Fields that say which machine it is: the place of a measurement does."""
_FREE = {"options", "graph_capture", "batch_bucket", "q_bucket", "k_bucket"}
"""Fields that do not tell one measurement from another. A recorded call runs the kernel of the one that is not."""
_SWITCHES = {"scale": None, "softcap": 0.0, "dropout": 0.0}
"""Fields whose value changes nothing but the result, beside this one."""
_VALUES = {"scale": 0.5, "softcap": 50.0, "dropout": 0.5}
"""Any others."""


def request_key(request: AttentionRequest) -> dict[str, Any]:
    """What of a request decides which backend is fast, besides the lengths."""
    found = {name: v for name, v in plain_request(request.normalised()).items() if name not in _WHERE | _FREE}
    return {name: True if name in _SWITCHES else value for name, value in found.items()}


def request_of(key: Mapping[str, Any]) -> AttentionRequest:
    """A request that has such a key. Where any value of a field does, it has one.

    Raises:
        ConfigError: no request has.
    """
    return read_request({name: _VALUES.get(name, value) for name, value in key.items()}, "a measurement")


def with_lengths(request: AttentionRequest, batch: int, s_q: int, s_k: int) -> AttentionRequest:
    """The request at lengths of a call: (B or N, the longest S_q, the longest S_k)."""
    return dataclasses.replace(request, batch_bucket=bucket(batch), q_bucket=bucket(s_q), k_bucket=bucket(s_k))


@dataclasses.dataclass(frozen=True)
class Advice:
    """What measurements have to say on a request.

    Attributes:
        order: (backend, why), the fastest first. avoid: backends that are quarantined for it.
        notes: what else a reader should know: who is quarantined and why, which measurements are not used.
        kin: whose measurements these are, where they are not of the request itself.
    """

    order: tuple[tuple[str, str], ...] = ()
    avoid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kin: Kin | None = None


NOTHING = Advice()
"""Where nothing was measured."""


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
    """All measurements of this very request on this device, of any lengths: of this machine, else shipped ones."""
    here = known(request, place)
    return () if here is NOT_ANY else here.measured.get(canonical(request_key(request)), ())


def advising(request: AttentionRequest, place: Callable[[], Place]) -> Sequence[Measured]:
    """All measurements that have a say in a request: its own, then those of requests like it."""
    here = known(request, place)
    return () if here is NOT_ANY else _advising(here, request_key(request))


def advise(request: AttentionRequest, place: Callable[[], Place]) -> Advice:
    """What to choose for a request.

    Args:
        request: with lengths in its buckets, or without: then what is fastest over all that were measured.
        place: of measurements on this device; asked only where there are any.
    """
    here = known(request, place)
    if here is NOT_ANY:
        return NOTHING
    fields = request_key(request)
    key = canonical(fields)
    held = here.quarantined.get(key, {})
    notes = [
        f"{name} is quarantined for such requests: {reason}; `polyattn tune --release {name}` lets it be chosen again"
        for name, reason in held.items()
    ]
    said = _order(request, _advising(here, fields))
    if key not in here.measured and (others := here.elsewhere.get(key)):
        notes.append(f"{len(others)} measurements of such requests are not used: {'; '.join(dict.fromkeys(others))}")
    order = tuple((name, why) for name, why in said.order if name not in held)
    return dataclasses.replace(said, order=order, avoid=tuple(held), notes=tuple(notes))


def shipped_advice(request: AttentionRequest, place: Callable[[], Place], *, own: bool = True) -> Advice:
    """What the measurements that plugins ship say, as where nothing was measured here.

    Args:
        request, place: as `advise`. own: False leaves out what they have of this very request.
    """
    return _order(request, _advising(shipped(place), request_key(request), own=own))


def _advising(here: Known, key: Mapping[str, Any], *, own: bool = True) -> Sequence[Measured]:
    return (*(here.measured.get(canonical(key), ()) if own else ()), *here.kin(key))


def _order(request: AttentionRequest, found: Sequence[Measured]) -> Advice:
    lengths, recorded = (request.batch_bucket, request.q_bucket, request.k_bucket), bool(request.graph_capture)
    return _near(found, lengths, recorded) if any(lengths) else _overall(found, recorded)


def _near(found: Sequence[Measured], lengths: Lengths, recorded: bool) -> Advice:
    """The order at the nearest lengths that were measured: of the request itself, else of one like it."""
    off = [
        (m.kin is not None, distance + (m.kin.off if m.kin else 0.0), i)
        for i, m in enumerate(found)
        if (distance := _distance(m.lengths, lengths)) is not None
    ]
    if not off:
        return NOTHING
    best = found[min(off)[2]]
    return Advice(tuple((name, best.why(name)) for name in best.costs(recorded=recorded)), kin=best.kin)


def _distance(a: Lengths, b: Lengths) -> float | None:
    """In factors of two, added up; None where one length is further off than `NEAR`."""
    if 0 in (*a, *b):
        return 0.0 if a == b else None
    off = [abs(math.log2(x / y)) for x, y in zip(a, b, strict=True)]
    return sum(off) if max(off) <= math.log2(NEAR) else None


def meet(a: Lengths, b: Lengths) -> bool:
    """Whether there are lengths that both of these are near."""
    return all(max(x, y) <= NEAR * NEAR * min(x, y) for x, y in zip(a, b, strict=True))


def _overall(found: Sequence[Measured], recorded: bool) -> Advice:
    """The order where lengths are not known: by the geometric mean of what each loses to the fastest."""
    if found and (kin := found[0].kin) is not None:  # the nearest come first
        found = [m for m in found if m.kin is not None and m.kin.fields == kin.fields]
    else:
        found, kin = [m for m in found if m.kin is None], None
    if len(found) == 1:
        return Advice(tuple((name, found[0].why(name)) for name in found[0].costs(recorded=recorded)), kin=kin)
    costs = [m.costs(recorded=recorded) for m in found]
    names = [name for name in (costs[0] if costs else ()) if all(name in one for one in costs)]
    losses = {
        name: math.exp(sum(math.log(one[name] / min(one.values())) for one in costs) / len(costs)) for name in names
    }
    rules = {m.rule for m in found}
    dates = min((m.date for m in found), default="")
    all_of_them = f"the fastest over {len(found)} measured lengths, measured {age(dates)}{whose(kin)}"
    order = ranked(losses, rules.pop() if len(rules) == 1 else "")
    return Advice(tuple((name, f"{losses[name]:.2f} x {all_of_them}") for name in order), kin=kin)
