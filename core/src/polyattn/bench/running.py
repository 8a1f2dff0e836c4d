"""A run: row after row, each timed between two looks at what the device itself can do.

A row's entries are checked, then the device is looked at, then they are timed in turns
(`polyattn.bench.measure.measure`), and the device is looked at again. Where its rates differ by more than
`ANCHORS_WITHIN`, the row is measured once more, and again when the others are done, as far as the time goes; then it is
kept as not accepted: no verdict reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import BackendUnavailableError, PolyattnError, UnsupportedRequestError
from ..selection.inspection import catalogue, served_by
from ..selection.overrides import current_settings
from ..selection.select import Policy, Selection, select
from ..selection.tuned_policy import measured_policy, shipped_policy
from .bars import ANCHORS_WITHIN, difference
from .entries import OWN, Entry, Seen, entries_of, why_none
from .measure import Anchors, Clock, Measured, Workload, measure
from .measure.clock import ROUNDS, made_current
from .measure.probe import Prober
from .measure.running import without_inputs
from .peers import Peer
from .results import kept, provenance
from .rows import Row, Work
from .tuner.offline import Isolation, tune_one
from .workloads import inputs_of, workload

__all__ = ["ATTEMPTS", "DeviceLost", "Plan", "ceiling", "measured", "run"]

ATTEMPTS = 2
"""At a row, one after another; and so many again for those that were rejected, when the others are done."""
_TUNED_WITHIN = 45.0
"""Seconds of tuning a row, checks included, after which no other round begins."""


class DeviceLost(RuntimeError):  # noqa: N818 - a message to the process that starts this one, no error to catch
    """An entry left the device unusable for this process. place: "row id/entry"."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"the device was lost at {place}: {reason}")
        self.place, self.reason = place, reason


@dataclasses.dataclass(frozen=True)
class Plan:
    """Describes what is measured, and how.

    Attributes:
        rows. peers: by name. candidates: patterns of backends. device.
        seconds: of measuring, for each entry of a row in a round. limit: seconds after which no further row is begun.
        tune: each row's request is tuned before it is measured, unless the store knows it.
        quick: rows as small as they get, timed once, without what is compiled first; the times mean nothing, and no
            row is rejected.
        again: rows that the result has are measured all the same, and take their place.
        isolation: whom the tuner tries in a process of its own first (`measuring.tuner.tune_one`).
    """

    rows: Sequence[Row]
    peers: Mapping[str, Peer]
    candidates: Sequence[str]
    device: torch.device
    seconds: float
    limit: float
    quick: bool
    tune: bool = False
    again: bool = False
    isolation: Isolation = "auto"

    def sized(self, row: Row) -> Row:
        """The row as this run measures it."""
        return row.tiny() if self.quick else row


def run(plan: Plan, result: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    """Measure the rows that the result has not, and put them into it.

    Args:
        result: as `results.begin` or `results.resumed` makes it. tell: is given each row's result.

    Yields:
        The result after each row, to be written down.

    Raises:
        DeviceLost: at an entry that the result's `lost` names from then on; this process can measure no more.
    """
    began = time.monotonic()
    clock = Clock(plan.device, plan.seconds)
    anchors = Anchors(clock)
    with Prober(str(plan.device)) if plan.tune else contextlib.nullcontext() as prober:
        for number, row in enumerate((*plan.rows, *plan.rows)):
            before = kept(result, row)
            if before is not None and not (plan.again and number < len(plan.rows)):
                continue
            if time.monotonic() - began > plan.limit:
                return
            why_not = _tuned(row, plan, prober) if prober is not None else ""
            with made_current(plan.device):
                found = {**_best_of_attempts(row, plan, anchors, result["lost"]), **provenance(before)}
            if why_not:
                found["note"] = "; ".join(filter(None, (found.get("note"), f"not tuned: {why_not}")))
            others = [one for one in result["rows"] if (one["family"], one["name"]) != (row.family, row.name)]
            result["rows"] = [*others, found]
            tell(found)
            yield result


def _tuned(row: Row, plan: Plan, prober: Prober) -> str:
    """Tune the request of a row, and say why that could not be done, if so."""
    try:
        tune_one(
            workload(plan.sized(row), plan.device),
            plan.device,
            prober,
            isolation=plan.isolation,
            deadline=time.monotonic() + _TUNED_WITHIN,
            source="polyattn bench --tune",
        )
    except PolyattnError as exc:
        return _line(exc)
    except Exception as exc:
        if why := without_inputs(exc):
            return why
        raise
    return ""


def _best_of_attempts(row: Row, plan: Plan, anchors: Anchors, lost: dict[str, str]) -> dict[str, Any]:
    """The first accepted one, else the last."""
    found: dict[str, Any] = {}
    for attempt in range(1, ATTEMPTS + 1):
        found = {**measured(row, plan, anchors, lost), "attempt": attempt}
        if found["accepted"]:
            break
    return found


class _Looks:
    """The two looks at the device around the times of a row."""

    def __init__(self, anchors: Anchors) -> None:
        self._anchors, self._start = anchors, dict[str, float]()

    def first(self) -> None:
        self._start = self._anchors()

    def last(self) -> tuple[float, dict[str, float]]:
        """(how far the rates are from those of the first look, the middle of both). Where nothing was timed there was
        no first."""
        end = self._anchors()
        return difference(self._start, end), {n: (self._start.get(n, rate) + rate) / 2 for n, rate in end.items()}


def measured(row: Row, plan: Plan, anchors: Anchors, lost: dict[str, str]) -> dict[str, Any]:
    """Measure one row, once. lost: "row id/entry" -> why it is left out, of entries that took the device with them."""
    began = time.monotonic()
    small = plan.sized(row)
    entries: dict[str, dict[str, Any]] = {}
    choice: dict[str, str] = {}
    note = ""
    clock, looks, seen = anchors.clock, _Looks(anchors), Seen()
    try:
        gone = {place.removeprefix(f"{row.id}/"): why for place, why in lost.items() if place.startswith(f"{row.id}/")}
        entries, choice, note = _measured(small, plan, clock, gone, seen, looks)
    except (UnsupportedRequestError, BackendUnavailableError) as exc:
        note = _line(exc)
    except Exception as exc:
        note = without_inputs(exc)
        if not note:
            if isinstance(exc, RuntimeError):
                _check_device(clock, f"{row.id}/{seen.last}", exc, lost)
            raise
    # Before its memory goes back to the driver: for a while after that an H200 copies 10% slower.
    off, rates = looks.last()
    _free(plan.device)
    work = small.work()
    for entry in entries.values():
        if "us" in entry:
            entry["rate"] = float(f"{work.rate(entry['us'] / 1e6):.5g}")
            entry["percent"] = round(100 * ceiling(work, rates)[1] * 1e6 / entry["us"], 1)
    return {
        "sheet": row.sheet,
        "family": row.family,
        "kind": row.kind,
        "name": row.name,
        "model": row.model,
        "fields": row.fields(),
        "unit": work.unit,
        "operations": work.operations,
        "bytes": work.bytes,
        "bound": ceiling(work, rates)[0],
        "accepted": plan.quick or off <= ANCHORS_WITHIN,
        "anchors": {name: float(f"{rate:.5g}") for name, rate in rates.items()},
        "moved": round(off, 4),
        "seconds": round(time.monotonic() - began, 1),
        "entries": entries,
        "choice": choice,
        **({"note": note} if note else {}),
    }


def ceiling(work: Work, rates: Mapping[str, float]) -> tuple[str, float]:
    """(what bounds a call, seconds that it would take at the device's own rate): the products at that of a large
    matrix product, or the bytes of keys and values at that of a streaming read, whichever takes longer."""
    bounds = {"matmul": work.operations / (rates["matmul"] * 1e12), "read": work.bytes / (rates["read"] * 1e9)}
    name = max(bounds, key=lambda one: bounds[one])
    return name, bounds[name]


def _measured(
    row: Row, plan: Plan, clock: Clock, lost: Mapping[str, str], seen: Seen, looks: _Looks
) -> tuple[dict[str, dict[str, Any]], dict[str, str], str]:
    """Return what became of every entry, which candidate polyattn chooses, `bars.CHOICES`, and why there is no entry.
    lost: entry -> why. looks: the first is taken before anything is timed."""
    asked = workload(row, plan.device)
    entries = entries_of(asked, plan.device, plan.peers, plan.candidates, seen)
    gone = {one.name: ("lost", lost[one.name]) for one in entries if one.name in lost}
    if plan.quick:
        slow = [one.name for one in entries if one.compiles and one.name.removeprefix(OWN) not in plan.candidates]
        gone |= dict.fromkeys(slow, ("refused", "not compiled in a quick run"))
    inputs = inputs_of(row, asked, plan.device)
    # Only here: whoever is named instead would find no room for them either.
    if not entries:
        return {}, _choices(asked, entries), why_none(asked, plan.device, plan.candidates)
    going = [one for one in entries if one.name not in gone]
    found = measure(
        inputs,
        going,
        clock=clock,
        rounds=1 if plan.quick else ROUNDS,
        recorded=row.recorded,
        ready=looks.first,
        whole=True,
    )
    # What is lost may be noticed by whoever comes next.
    clock.synchronise()
    said = {name: _entry(one, seen.peaks.get(name, 0)) for name, one in found.items()}
    said |= {name: {"kind": kind, "failed": why} for name, (kind, why) in gone.items()}
    for one in entries:
        about = _served_by(one.selection) if one.selection is not None else None
        said[one.name] |= {"served_by": about} if about else {"peer": True}
    return {one.name: said[one.name] for one in entries}, _choices(asked, entries), ""


def _entry(found: Measured, peak: int) -> dict[str, Any]:
    if found.time is None:
        return {"kind": found.kind, "failed": found.reason}
    return {
        "us": round(found.time.seconds * 1e6, 3),
        "spread": round(found.time.spread, 4),
        "count": found.time.count,
        "rounds": found.time.rounds,
        **({} if found.time.between is None else {"between": round(found.time.between, 4)}),
        "margin": round(found.margin, 3),
        "peak_bytes": peak,
    }


def _served_by(selection: Selection) -> str:
    return ", ".join([f"{selection.id} ({selection.provider})", *selection.steps()])


def _choices(asked: Workload, entries: Sequence[Entry]) -> dict[str, str]:
    """Return which candidate a call would get without a named backend, by `bars.CHOICES`; nothing where none would
    serve."""
    names = {_key(one.selection): one.name for one in entries if one.selection is not None}
    try:
        rules = Policy(strict=current_settings().strict)
        found = {
            "tuned": select(asked.request, catalogue(), measured_policy(rules, asked.request)),
            "shipped": select(asked.request, catalogue(), shipped_policy(rules, asked.request)),
            "unseen": select(asked.request, catalogue(), shipped_policy(rules, asked.request, own=False)),
            "rules": select(asked.request, catalogue(), rules),
        }
    except (UnsupportedRequestError, BackendUnavailableError):
        return {}
    # Who is no candidate of this run has no entry, and no other's name.
    others = {how: OWN + served_by(selection).partition("@")[0] for how, selection in found.items()}
    return {how: names.get(_key(selection), others[how]) for how, selection in found.items()}


def _key(selection: Selection) -> tuple[Any, ...]:
    return selection.id, selection.provider, selection.lowerings


def _check_device(clock: Clock, place: str, exc: RuntimeError, lost: dict[str, str]) -> None:
    """Raise DeviceLost where the device is lost, and not only a call."""
    try:
        clock.synchronise()
        _free(clock.device)
    except RuntimeError as gone:
        lost[place] = _line(exc)
        raise DeviceLost(place, _line(exc)) from gone


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _line(exc: BaseException) -> str:
    return " ".join(f"{type(exc).__name__}: {exc}".split())[:400]
