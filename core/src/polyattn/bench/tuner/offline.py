"""The tuner: for each workload every backend that takes it is tried, those that are right are timed, and all of it is
kept in the store. What is there already is not measured again."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch

from ...dispatch.device_facts import device_facts
from ...errors import ConfigError, PolyattnError, did_you_mean
from ...registry.manager import get_manager
from ...selection.tuned_policy import tuning_place
from ...tuning import (
    Measured,
    Place,
    Quarantined,
    advise,
    backend_row,
    measured,
    mode,
    quarantine,
    record,
    request_key,
    store,
)
from ...tuning.offline import check_limits
from ...tuning.rows import canonical
from ..measure.clock import ROUNDS, Clock, made_current
from ..measure.entrants import Candidate, candidates
from ..measure.inputs import make_inputs
from ..measure.marks import Marks
from ..measure.probe import Prober
from ..measure.running import estimated, forms, measure, without_inputs
from ..measure.workload import Workload

__all__ = ["Isolation", "Tried", "isolation_of", "tune_all", "tune_one"]

Isolation = Literal["auto", "always", "never"]
"""Which backends are tried in a process of their own first: those of other packages than polyattn's, all, or none."""

Outcome = Literal["measured", "known", "alone", "refused", "not begun"]
_SOURCE = "polyattn tune"
_PROBING = 0.75
"""Share of a strict time in which candidates are tried in another process."""
_CALLS = 6
"""Calls that it takes to check a slow candidate and to time it."""
_BLAMED = "two processes that measured it ended while it ran, though it was right in one of its own"
_HARMLESS = ("refused", "memory", "late")
"""What keeps nobody out of automatic choice."""


def isolation_of(word: str) -> Isolation:
    """
    Raises:
        ConfigError: a word of `--isolate` that says nothing.
    """
    known: dict[str, Isolation] = {one: one for one in get_args(Isolation)}
    if word not in known:
        raise ConfigError(f"--isolate {word!r}.{did_you_mean(word, known)} Allowed: {', '.join(known)}")
    return known[word]


@dataclasses.dataclass(frozen=True)
class Tried:
    """Describes what became of a workload.

    Attributes:
        outcome: it was `measured` now, is `known` from before, has one backend `alone`, was `refused` (see reason), or
            was `not begun` within the time, or not brought far enough.
        times: microseconds of the device by backend, who is chosen first. host: of the host, where that was measured.
        rule: who serves it without measurements.
        trouble: why other candidates have no time. quarantined: those that were not so before.
    """

    workload: Workload
    outcome: Outcome
    times: Mapping[str, float] = dataclasses.field(default_factory=dict)
    host: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rule: str = ""
    trouble: Mapping[str, str] = dataclasses.field(default_factory=dict)
    quarantined: tuple[str, ...] = ()
    reason: str = ""

    @property
    def best(self) -> str:
        """Return the candidate that is chosen; without times, who serves it anyway."""
        return next(iter(self.times), self.rule)

    @property
    def gain(self) -> float:
        """How many times as fast as without measurements, by what decides (`Measured.costs`)."""
        measured = Measured(self.workload.buckets, self.times, "", host=self.host)
        costs = measured.costs(recorded=bool(self.workload.request.graph_capture))
        return costs[self.rule] / costs[self.best] if self.rule in costs else 1.0


def tune_all(
    workloads: Sequence[Workload],
    device: torch.device,
    *,
    seconds: float = 600.0,
    rounds: int = ROUNDS,
    again: bool = False,
    isolation: Isolation = "auto",
    probe_seconds: float = 180.0,
) -> Iterator[Tried]:
    """Tune workloads one after another; each is in the store as soon as it is yielded.

    Args:
        seconds: after so much no other workload is begun. rounds: of timing. again: measure what is known too.
        isolation: who is tried in a process of its own. probe_seconds: for one such trial.

    Raises:
        InvalidInputError: seconds, rounds or probe_seconds that are none. ConfigError: tuning is off.
    """
    if mode() == "off":
        raise ConfigError("POLYATTN_TUNING=off reads no measurements, so none are made; unset it to tune")
    check_limits(seconds, rounds)
    end = time.monotonic() + seconds
    with Prober(str(device), probe_seconds) as prober:
        for workload in dict.fromkeys(_here(workload, device) for workload in workloads):
            if time.monotonic() > end:
                yield Tried(workload, "not begun", reason=f"the time of {seconds:g} s was up")
                continue
            yield tune_one(workload, device, prober, rounds=rounds, again=again, isolation=isolation, deadline=end)


def tune_one(
    workload: Workload,
    device: torch.device,
    prober: Prober,
    *,
    rounds: int = ROUNDS,
    again: bool = False,
    isolation: Isolation = "auto",
    deadline: float | None = None,
    strict: bool = False,
    source: str = _SOURCE,
) -> Tried:
    """Tune one workload. Arguments as `tune_all`.

    Args:
        deadline: `time.monotonic()` after which no other round begins.
        strict: nor anything else: who was not reached by then has no time, nor who would not be done by then.
    """
    workload = _here(workload, device)
    place = tuning_place(workload.request.platform, device)
    known = [] if again else [m for m in measured(workload.request, lambda: place) if m.lengths == workload.buckets]
    try:
        workload.check_makeable()
        able = candidates(workload, device)
    except PolyattnError as exc:
        return Tried(workload, "refused", reason=str(exc).partition("\n")[0])
    rule = next((c.name for c in able if c.chosen), "")
    avoided = set(advise(workload.request, lambda: place).avoid)
    # What `strict` time was too short for is measured where there is more of it.
    if known and not known[0].shipped and (strict or not known[0].late) and (left := known[0].without(avoided)):
        return Tried(workload, "known", *_chosen_first(dataclasses.replace(known[0], times=left), workload), rule)
    able = tuple(c for c in able if not avoided & {c.whole, c.selection.backend})
    if len(able) < 2:
        return Tried(workload, "alone", rule=rule, reason="no other backend takes it")
    with made_current(device):
        return _tune(workload, place, able, rule, device, prober, rounds, isolation, deadline, strict, source)


def _tune(
    workload: Workload,
    place: Place,
    able: Sequence[Candidate],
    rule: str,
    device: torch.device,
    prober: Prober,
    rounds: int,
    isolation: Isolation,
    deadline: float | None,
    strict: bool,
    source: str,
) -> Tried:
    began, end = time.monotonic(), math.inf if deadline is None else deadline
    said = _Verdicts(place, workload, able, rule)
    for candidate in able:
        if isolation == "always" or (isolation == "auto" and not _own(candidate)):
            # Who hangs leaves time for the others.
            until = began + _PROBING * (end - began) if strict else math.inf
            # Kept at once: what comes after may end this process.
            said.add({candidate.name: prober.examine(workload, candidate.name, until)})
    fit = [c for c in able if c.name not in said.trouble]
    foreign = {c.name: _filed(place, c.name, workload) for c in fit if not _own(c)}
    with _measuring(), Marks(store().path, foreign) as marks:
        said.add(dict.fromkeys(marks.blamed, ("crashed", _BLAMED)))
        fit = [c for c in fit if c.name not in said.trouble]
        if strict:
            said.add(_too_slow(workload, fit, Clock(device), end, marks))
            fit = [c for c in fit if c.name not in said.trouble]
        try:
            inputs = make_inputs(workload, device)
        except Exception as exc:
            # What nobody can make is no reason not to measure the others; a device that fails is.
            if isinstance(exc, PolyattnError):
                return said.without_times("refused", f"its inputs cannot be made: {exc}")
            if why := without_inputs(exc):
                return said.without_times("refused", why)
            raise
        found = measure(
            inputs,
            fit,
            clock=Clock(device),
            rounds=rounds,
            **forms(workload),
            late=lambda: time.monotonic() > end,
            strict=strict,
            running=marks.running,
        )
    said.add({name: (one.kind, one.reason) for name, one in found.items() if one.time is None})
    times = {name: round(one.time.seconds * 1e6, 3) for name, one in found.items() if one.time is not None}
    host = {name: round(one.host.seconds * 1e6, 3) for name, one in found.items() if one.host is not None}
    late = [name for name, (kind, _) in said.trouble.items() if kind == "late"]
    if strict and late and (len(times) < 2 or rule in late):
        # Without a time of the choice that is made anyway, nobody is known to be faster.
        what = "two backends were" if len(times) < 2 else f"{rule}, the choice without measuring, was"
        return said.without_times("not begun", f"the time of {end - began:.3g} s was up before {what} timed")
    if not times:
        return said.without_times("refused", "not one backend could be measured")
    by = {candidate.name: candidate.kind for candidate in able}
    row = backend_row(place, workload.request, workload.buckets, times, source, host=host, rule=rule, by=by, late=late)
    record(row)
    return Tried(workload, "measured", row.value["times"], host, rule, said.texts(), tuple(said.held))


class _Verdicts:
    """Describes what is wrong with the candidates of a workload; who misbehaves is quarantined as soon as that is
    known.

    Attributes:
        trouble: (kind, reason) by name. held: who was quarantined.
    """

    def __init__(self, place: Place, workload: Workload, able: Sequence[Candidate], rule: str) -> None:
        self._place, self._workload, self._rule = place, workload, rule
        self._left = [candidate.name for candidate in able]
        self._whole = {candidate.name: candidate.whole for candidate in able}
        self.trouble: dict[str, tuple[str, str]] = {}
        self.held: list[str] = []

    def add(self, trouble: Mapping[str, tuple[str, str]]) -> None:
        """Record what is wrong with a candidate. An empty kind means that nothing is."""
        self.trouble |= {name: why for name, why in trouble.items() if why[0]}
        bad = [name for name, (kind, _) in trouble.items() if kind and kind not in _HARMLESS]
        if len(bad) == len(self._left) and bad:
            # Somebody has to serve: who would without measurements.
            spared = self._rule if self._rule in bad else bad[0]
            kind, reason = self.trouble[spared]
            self.trouble[spared] = kind, f"{reason}; it is not quarantined, for nobody else is left"
            bad.remove(spared)
        if not bad:
            return
        key, now = request_key(self._workload.request), datetime.datetime.now(datetime.timezone.utc).isoformat()
        batch, (s_q, s_k) = self._workload.batch, self._workload.longest
        where, texts = f"at batch {batch}, S_q {s_q}, S_k {s_k}", self.texts()
        held = ((self._whole[name], texts[name]) for name in bad)
        quarantine(*(Quarantined(self._place, whole, key, f"{text} ({where})", now) for whole, text in held))
        self.held += bad
        self._left = [name for name in self._left if name not in bad]

    def texts(self) -> dict[str, str]:
        """Return the texts for people."""
        return {name: f"{kind}: {reason}" for name, (kind, reason) in self.trouble.items()}

    def without_times(self, outcome: Outcome, reason: str) -> Tried:
        """Return the result of a workload without times."""
        held = tuple(self.held)
        return Tried(self._workload, outcome, rule=self._rule, trouble=self.texts(), quarantined=held, reason=reason)


def _chosen_first(known: Measured, workload: Workload) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """(times, host) of what was measured before."""
    costs = known.costs(recorded=bool(workload.request.graph_capture))
    return {name: known.times[name] for name in costs}, known.host


def _filed(place: Place, name: str, workload: Workload) -> str:
    """A backend, its requests and this device, as one text."""
    return canonical({"place": str(place), "backend": name, "request": request_key(workload.request)})


def _too_slow(
    workload: Workload, fit: Sequence[Candidate], clock: Clock, end: float, marks: Marks
) -> dict[str, tuple[str, str]]:
    """(kind, reason) of the candidates whose calls there is no time for, beside those before them."""
    found, taken = {}, 0.0
    for candidate in fit:
        left = end - time.monotonic() - taken
        if left <= 0:
            break  # it is said of each where they are measured
        with marks.running(candidate.name):
            took = estimated(workload, candidate, clock, left)
        if took * _CALLS > left:
            found[candidate.name] = (
                "late",
                f"one call would take about {took:.2g} s, and it is timed within {left:.2g} s",
            )
        else:
            taken += took * _CALLS
    return found


def _own(candidate: Candidate) -> bool:
    """Return whether it is made of torch's own operators, by polyattn itself."""
    manager = get_manager()
    return manager.owner(manager.backends[candidate.selection.backend, candidate.selection.platform]).name == "core"


@contextlib.contextmanager
def _measuring() -> Iterator[None]:
    """Gradients as the workload wants them, whatever the caller's mode is."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _here(workload: Workload, device: torch.device) -> Workload:
    """The workload on this machine, whatever machine it was recorded on."""
    facts = {"platform": "cpu", "arch": "", "toolkit": (), "features": (), **device_facts(device)}
    return dataclasses.replace(workload, request=dataclasses.replace(workload.request, **facts, options=()))
