"""Measuring, because somebody asked for it: a bounded list of candidates, within a limit of time."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidInputError, UnsupportedRequestError
from .current import record
from .kernels import Choices, Kernel, Key
from .places import place_of
from .rows import Row

if TYPE_CHECKING:
    from torch import device

__all__ = ["MOST_CANDIDATES", "Trial", "Tuned", "check_limits", "note_serving", "serving", "tune"]

MOST_CANDIDATES = 256

_serving: list[str] = []


def note_serving(what: str) -> None:
    """This process serves requests from here on: nothing is measured in it unless that is asked for."""
    if what not in _serving:
        _serving.append(what)


def serving() -> str:
    """Return what serves in this process; "" = nothing does."""
    return ", ".join(_serving)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A candidate: microseconds of each of its measurements, or why it has none."""

    candidate: Choices
    times: tuple[float, ...] = ()
    failure: str = ""

    @property
    def microseconds(self) -> float:
        """The middle one, of two the faster."""
        return sorted(self.times)[(len(self.times) - 1) // 2]


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Describes the result of a tuning run.

    Attributes:
        row: the measurement that was recorded. trials: all candidates, in their order; those that the time did not
            reach have neither times nor a failure.
        complete: every candidate was measured in every round.
    """

    row: Row
    trials: tuple[Trial, ...]
    complete: bool


def check_limits(seconds: float, rounds: int) -> None:
    """Check a tuner's limits.

    Raises:
        InvalidInputError: one is not above 0.
    """
    for name, value in (("seconds", seconds), ("rounds", rounds)):
        if not value > 0:
            raise InvalidInputError(f"tune: {name}={value} must be above 0")


def tune(
    kernel: Kernel,
    key: Key,
    candidates: Sequence[Choices],
    measure: Callable[[Choices], float],
    *,
    where: device,
    seconds: float = 60.0,
    rounds: int = 3,
    source: str = "polyattn.tuning.tune",
    while_serving: bool = False,
) -> Tuned:
    """Measure candidates one after another, in several rounds, and record the fastest.

    A drift of the device's clock meets all candidates alike, because every round measures each of them once.

    Args:
        kernel: what is tuned. key: for what. candidates: at most 256.
        measure: runs a candidate and returns its microseconds; it checks the result, and raises if that is wrong.
        where: the device. seconds: after so much no other measurement begins. rounds: measurements of each.
        source: who measured. while_serving: also in a process that serves.

    Raises:
        InvalidInputError: no candidates, or too many. ConfigError: one that the kernel does not have.
        UnsupportedRequestError: the process serves, or not one candidate could be measured (`rejected` says why).
    """
    if _serving and not while_serving:
        raise UnsupportedRequestError(
            f"nothing is tuned in a process that serves ({serving()}): its requests would wait. Tune in a "
            f"process of its own; the store is shared. while_serving=True does it here all the same"
        )
    if not 0 < len(candidates) <= MOST_CANDIDATES:
        raise InvalidInputError(f"tune: {len(candidates)} candidates; 1 to {MOST_CANDIDATES} are measured")
    check_limits(seconds, rounds)
    named = kernel.named(key)
    for candidate in candidates:
        kernel.check(candidate)
    times: list[list[float]] = [[] for _ in candidates]
    failures = [""] * len(candidates)
    end, complete = time.monotonic() + seconds, True
    for i in (i for _ in range(rounds) for i in range(len(candidates))):
        if failures[i]:
            continue
        if time.monotonic() > end:
            complete = False
            break
        try:
            times[i].append(_positive(measure(candidates[i])))
        except Exception as exc:  # noqa: BLE001 - a candidate may not compile, or fail in any way: that is its verdict
            failures[i] = f"{type(exc).__name__}: {exc}"
    zipped = zip(candidates, times, failures, strict=True)
    trials = tuple(Trial(c, () if why else tuple(t), why) for c, t, why in zipped)
    # Rounds that were not finished: who was measured less often is no better for it.
    most = max(len(trial.times) for trial in trials)
    if not most:
        raise UnsupportedRequestError(
            f"not one of {len(candidates)} candidates for kernel {kernel.name!r} could be measured within {seconds} s",
            {str(dict(t.candidate)): [t.failure or "the time was up"] for t in trials},
        )
    best = min((t for t in trials if len(t.times) >= max(most - 1, 1)), key=lambda t: t.microseconds)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")
    place = place_of(where, kernel.versions, kernel.revision)
    row = Row(place, kernel.subject, named, dict(best.candidate), best.microseconds, now, source)
    record(row)
    return Tuned(row, trials, complete)


def _positive(microseconds: float) -> float:
    if not 0 < microseconds < float("inf"):
        raise InvalidInputError(f"measure() returned {microseconds!r}; microseconds are finite and above 0")
    return float(microseconds)
