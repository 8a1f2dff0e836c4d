"""This module finds the fastest measured backend for a request, and the backends that must not be chosen for it.

Nothing here measures, and nothing imports torch.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ..contract import AttentionRequest
from ..contract.names import parts
from .kernels import bucket, fine_bucket
from .keys import request_key
from .known import NOT_ANY, Known, known, shipped
from .rows import BACKEND, Place, Row, canonical
from .similarity import octaves, within
from .times import FAR, NEAR, Lengths, Measured, SimilarRequest, describe_origin, ranked, where

__all__ = [
    "NOTHING",
    "Advice",
    "advise",
    "advising",
    "backend_row",
    "measured",
    "meet",
    "shipped_advice",
    "with_lengths",
]


def with_lengths(request: AttentionRequest, batch: int, s_q: int, s_k: int) -> AttentionRequest:
    """The request at the lengths of a call (`polyattn.contract.lengths.Extent`)."""
    batch, s_q, s_k = fine_bucket(batch), fine_bucket(s_q), fine_bucket(s_k)
    return dataclasses.replace(request, batch_bucket=batch, q_bucket=s_q, k_bucket=s_k)


@dataclasses.dataclass(frozen=True)
class Advice:
    """Describes what measurements have to say on a request.

    Attributes:
        order: (backend, why), the fastest first. avoid: backends that are quarantined for it.
        notes: what else a reader should know: who is quarantined and why, which measurements are not used.
        kin: whose measurements these are, where they are not of the request itself.
        by: as `Measured`. predicted: nothing was measured of it: these are predictions.
        otherwise: what measurements of other requests say, where these are predictions.
    """

    order: tuple[tuple[str, str], ...] = ()
    avoid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kin: SimilarRequest | None = None
    by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    predicted: bool = False
    otherwise: Callable[[], Advice] | None = dataclasses.field(default=None, compare=False)

    @property
    def how(self) -> str:
        """Who chooses, as `Selection.source` says it."""
        return "cost model" if self.predicted else "tuned"

    def by_rules(self, rules: str) -> Advice:
        """What of it counts by `Settings.rules`: where they are "seed", no prediction is a choice."""
        if not (self.predicted and rules == "seed"):
            return self
        return dataclasses.replace((self.otherwise or Advice)(), avoid=self.avoid, notes=self.notes)

    def choices(self) -> Iterator[tuple[str, str, str]]:
        """Backend, why, and whose kernels they are, the fastest first."""
        for whole, why in self.order:
            name, kind = parts(whole)
            yield name, why, self.by.get(whole) or kind


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
    by: Mapping[str, str] | None = None,
    late: Collection[str] = (),
) -> Row:
    """A measurement as it is recorded. times, host: microseconds by backend, or NAME/KIND; the rest as `Measured`."""
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
    if kinds := {name: by[name] for name in costs if by and by.get(name) and not parts(name)[1]}:
        value["by"] = kinds
    if late:
        value["late"] = sorted(late)
    return Row(place, BACKEND, key, value, times[best], now, source)


def measured(request: AttentionRequest, place: Callable[[], Place]) -> Sequence[Measured]:
    """Return all measurements of exactly this request on this device, of any lengths: of this machine, else shipped
    ones."""
    here = known(request, place)
    return () if here is NOT_ANY else here.own(request_key(request))


def advising(request: AttentionRequest, place: Callable[[], Place], tuning: str = "") -> Sequence[Measured]:
    """Return all measurements that count for a request: its own, then those of similar requests, without
    backends that are quarantined for it; where there are none, predictions at some lengths. tuning: as `known`."""
    here = known(request, place, tuning)
    if here is NOT_ANY:
        return ()
    key = request_key(request)
    return _advising(here, key) or _without_held(here, key, here.model.grid(request, key) if here.model else ())


def _advising(here: Known, key: Mapping[str, Any]) -> Sequence[Measured]:
    return _without_held(here, key, here.advising(key))


def _without_held(here: Known, key: Mapping[str, Any], found: Sequence[Measured]) -> Sequence[Measured]:
    held = here.quarantined.get(canonical(key)) if found else None
    if not held:
        return found
    # Who has nobody left to choose leaves it to others.
    left = [one.without(held) for one in found]
    return [dataclasses.replace(one, times=times) for one, times in zip(found, left, strict=True) if times]


def advise(request: AttentionRequest, place: Callable[[], Place], tuning: str = "") -> Advice:
    """Return what to choose for a request.

    Args:
        request: with lengths in its fine buckets, or without: then what is fastest over all that were measured.
        place: of measurements on this device; asked only where there are any. tuning: as `known`.
    """
    here = known(request, place, tuning)
    if here is NOT_ANY:
        return NOTHING
    fields = request_key(request)
    key = canonical(fields)
    held = here.quarantined.get(key, {})
    notes = [
        f"{name} is quarantined for such requests: {reason}; `polyattn tune --release {name}` lets it be chosen again"
        for name, reason in held.items()
    ]
    said = _order(request, here, fields)
    if all(one.shipped for one in here.own(fields)) and (others := here.elsewhere(fields)):
        notes.append(f"{len(others)} measurements of such requests are not used: {'; '.join(dict.fromkeys(others))}")
    return dataclasses.replace(said, avoid=tuple(held), notes=tuple(notes))


def shipped_advice(request: AttentionRequest, place: Callable[[], Place], *, own: bool = True) -> Advice:
    """Return what the measurements that plugins ship say, as where nothing was measured here.

    Args:
        request, place: as `advise`. own: False leaves out what they have of this very request.
    """
    return _order(request, shipped(place), request_key(request), own=own)


def _order(request: AttentionRequest, here: Known, key: Mapping[str, Any], *, own: bool = True) -> Advice:
    found = _without_held(here, key, here.advising(key, own=own))
    lengths, recorded = (request.batch_bucket, request.q_bucket, request.k_bucket), bool(request.graph_capture)
    if not any(lengths):
        # Nobody knows whether another tree has this one's size.
        found = [one for one in found if one.kin is None] if request.tree else found
        if not found and here.model is not None:
            found = _without_held(here, key, here.model.grid(request, key, own=own))
        return _overall(found, recorded)
    filed = bucket(lengths[0]), bucket(lengths[1]), bucket(lengths[2])

    def nearest(some: Sequence[Measured]) -> Advice:
        nears = (_near(some, filed, recorded, reach, tree=request.tree) for reach in (NEAR, FAR))
        return next((near for near in nears if near is not NOTHING), NOTHING)

    # One request like this one that somebody else measured knows less than the model made of all of them.
    if (said := nearest([one for one in found if one.kin is None or not one.shipped])) is not NOTHING:
        return said
    one = here.model.at(request, key, lengths, own=own) if here.model is not None and 0 not in lengths else None
    left = _without_held(here, key, [one]) if one is not None else ()
    if not left:
        return nearest(found)
    return dataclasses.replace(_of(left[0], recorded), otherwise=functools.partial(nearest, found))


def _near(found: Sequence[Measured], lengths: Lengths, recorded: bool, reach: int, *, tree: bool) -> Advice:
    """The order at the nearest lengths that were measured, of the request itself, else of one like it."""
    # Who is fast for a tree turns with its size: on an H200 FlashInfer is ahead for 16 drafts and far behind for 64.
    factors = (reach, 1 if tree else reach, reach)
    off = [
        (one.kin is not None, distance + (one.kin.off if one.kin else 0.0), one.shipped, i)
        for i, one in enumerate(found)
        if (distance := _distance(one, lengths, factors)) is not None
    ]
    if not off:
        return NOTHING
    return _of(found[min(off)[-1]], recorded)


def _distance(one: Measured, lengths: Lengths, factors: Lengths) -> float | None:
    """Return how far two requests are apart, in factors of two, added up; None where one length is further off than its
    factor."""
    measured = (*one.lengths[1:], one.lengths[0] if one.kin is None else one.kin.batch)
    asked, most = (*lengths[1:], lengths[0]), (*factors[1:], factors[0])  # whole numbers are compared faster
    if 0 in (*one.lengths, *lengths):
        return 0.0 if measured == asked else None
    return sum(map(octaves, measured, asked)) if all(map(within, measured, asked, most)) else None


def meet(a: Lengths, b: Lengths) -> bool:
    """Return whether there are lengths that both of these reach."""
    return all(max(x, y) <= FAR * FAR * min(x, y) for x, y in zip(a, b, strict=True))


def _overall(found: Sequence[Measured], recorded: bool) -> Advice:
    """The order where lengths are not known: by the geometric mean of what each loses to the fastest."""
    if found and (kin := found[0].kin) is not None:  # the nearest come first
        found = [m for m in found if m.kin is not None and m.kin.fields == kin.fields]
    else:
        found, kin = [m for m in found if m.kin is None], None
    mine = {name: kind for m in found if not m.shipped for name, kind in m.by.items()}
    # What was shipped of other kernels than are here says nothing.
    found = [m for m in found if not m.shipped or all(mine.get(name, kind) == kind for name, kind in m.by.items())]
    if len(found) == 1:
        return _of(found[0], recorded)
    costs = [m.costs(recorded=recorded) for m in found]
    kinds = {name: {m.by[name] for m in found if name in m.by} for name in (costs[0] if costs else ())}
    # Times of two libraries' kernels are no backend's.
    names = [name for name, of in kinds.items() if len(of) < 2 and all(name in one for one in costs)]
    by = {name: kind for name in names for kind in kinds[name]}
    losses = {
        name: math.exp(sum(math.log(one[name] / min(one.values())) for one in costs) / len(costs)) for name in names
    }
    rules = {m.rule for m in found}
    when = "" if not found else where(min(found, key=lambda one: (one.shipped, one.date)))
    predicted = any(m.predicted for m in found)
    how = "predicted" if predicted else "measured"
    all_of_them = f"the fastest over {len(found)} {how} lengths, {when}{describe_origin(kin)}"
    order = ranked(losses, rules.pop() if len(rules) == 1 else "", own=kin is None and not predicted)
    whom = {name: f"with {kind}, " for name, kind in by.items()}
    said = tuple((name, f"{whom.get(name, '')}{losses[name]:.2f} x {all_of_them}") for name in order)
    return Advice(said, kin=kin, by=by, predicted=predicted)


def _of(one: Measured, recorded: bool) -> Advice:
    """Turn one measurement into advice."""
    order = tuple((name, one.why(name)) for name in one.costs(recorded=recorded))
    return Advice(order, kin=one.kin, by=one.by, predicted=bool(one.predicted))
