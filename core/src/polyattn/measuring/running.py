"""Measuring several entrants beside one another: each is checked before it is timed, and all are timed in rounds."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from ..errors import UnsupportedRequestError
from .checking import Verdict, check
from .clock import ROUNDS, Clock, Time, Timing, interleaved
from .entrants import Call, Entrant
from .inputs import Inputs

__all__ = ["Measured", "examine", "measure", "out_of_memory", "peak_memory"]

_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"]+/)+(?=[^\s/'\"])")

_NO_MEMORY = ("DefaultCPUAllocator: ", "CUDA error: out of memory")
"""Texts of errors that say so."""

_ISSUED, _ISSUE_ROUNDS = 9, 3
"""Calls of one entrant issued at once, and how often."""
_HOST_MOST = 0.01
"""Seconds of a call, beside which those of issuing it say nothing."""

Trouble = Literal["", "refused", "memory", "wrong", "failed"]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What came of an entrant.

    Attributes:
        time: of one call, None where it was not timed. margin: of the check, 1 is all that is allowed.
        host: until one call returns, while nobody waits for it; None where nobody asked, or beside a far longer `time`.
        kind: why it was not: it `refused`, there was not `memory` enough, its result was `wrong`, or it `failed` in
            another way. reason: the same for people.
    """

    time: Time | None = None
    host: Time | None = None
    kind: Trouble = ""
    reason: str = ""
    margin: float = 0.0


def measure(
    inputs: Inputs,
    entrants: Iterable[Entrant],
    *,
    clock: Clock,
    rounds: int = ROUNDS,
    recorded: bool = False,
    issued: bool = False,
    late: Callable[[], bool] = lambda: False,
    ready: Callable[[], None] = lambda: None,
    whole: bool = False,
) -> dict[str, Measured]:
    """Check entrants and time those that are right; then check them once more, on another input set: who is right only
    at first, or of one set, is not.

    Args:
        rounds: how often everybody is timed; the middle counts.
        recorded: into a device graph of one call for each input set, as an engine replays a decode step.
        issued: also what a call costs the host.
        late: whether the time is up: no other round begins then.
        ready: called when all are checked, before the first is timed.
        whole: all of a result is compared (`checking.check`).
    """
    found: dict[str, Measured] = {}
    right: dict[str, _Right] = {}
    for entrant in (entrants := list(entrants)):
        said, calls = _examined(inputs, entrant, clock, recorded=recorded, whole=whole)
        found[entrant.name] = said
        if calls is not None:
            right[entrant.name] = calls
    ready()
    timings = {name: calls.timing for name, calls in right.items()}
    for name, took in interleaved(timings, rounds, late, settle=clock.on_gpu).items():
        wrong = _checked_again(inputs, right[name], clock, whole=whole)
        found[name] = wrong if wrong is not None else dataclasses.replace(found[name], time=took)
    if issued and (clock.on_gpu or inputs.grows):  # elsewhere the times are of whole calls, which were waited for
        _issue(inputs, entrants, found, clock, late)
    return found


def _issue(
    inputs: Inputs, entrants: Sequence[Entrant], found: dict[str, Measured], clock: Clock, late: Callable[[], bool]
) -> None:
    """Add what calls cost the host.

    Where keys grow, no call has the lengths of another, of whichever entrant: some libraries build a plan for each new
    length, and share it.
    """
    timings: dict[str, _Issues] = {}
    for number, entrant in enumerate(entrants):
        took = found[entrant.name].time
        if took is not None and took.seconds <= _HOST_MOST:
            count = 1 + _ISSUED * _ISSUE_ROUNDS
            given = inputs.growing(number * count, count) if inputs.grows else inputs
            timings[entrant.name] = _Issues(given, entrant, clock)
    for name, took in interleaved(timings, _ISSUE_ROUNDS, late).items():
        error = timings[name].error
        found[name] = dataclasses.replace(found[name], host=took) if error is None else _failed(error)


class _Issues:
    """Times the host, on the next sets in turn. Who was right at one length may fail at another: it takes for ever."""

    def __init__(self, inputs: Inputs, entrant: Entrant, clock: Clock) -> None:
        self._inputs, self._entrant, self._clock = inputs, entrant, clock
        self._order = itertools.cycle(range(inputs.count))
        self._call: Call | None = None
        self.error: Exception | None = None

    def __call__(self) -> Time:
        try:
            if self._call is None:
                self._call = self._entrant.prepare(self._inputs)
                self._call(next(self._order))
                self._clock.synchronise()
            return self._clock.issues([functools.partial(self._call, next(self._order)) for _ in range(_ISSUED)])
        except Exception as exc:  # noqa: BLE001 - a library may raise anything; it is reported in its place
            self.error = exc
            return Time(math.inf, 0.0, 0)


def examine(inputs: Inputs, entrant: Entrant) -> Measured:
    """Whether an entrant's result is right, without timing it."""
    return _examined(inputs, entrant, Clock(inputs.device), recorded=False)[0]


@dataclasses.dataclass(frozen=True)
class _Right:
    """Calls of an entrant whose result of set 0 is right: what times them, and the result of the last set from then
    on."""

    timing: Timing
    last: Callable[[], Any]


def _examined(
    inputs: Inputs, entrant: Entrant, clock: Clock, *, recorded: bool, whole: bool = False
) -> tuple[Measured, _Right | None]:
    before = inputs.digest()
    free = True
    try:
        call = entrant.prepare(inputs)
        calls, result = _calls(inputs, call, clock, recorded=recorded)
        clock.synchronise()
        if changed := [name for name, digest in inputs.digest().items() if digest != before[name]]:
            inputs.renew()
            return Measured(kind="wrong", reason=f"it writes to {', '.join(changed)}, which are not its to write"), None
        verdict = check(inputs, result, whole=whole)
        free = not verdict.ok
    except UnsupportedRequestError as exc:
        free = False  # it was asked, and did nothing
        return _failed(exc), None
    except Exception as exc:  # noqa: BLE001 - a library may raise anything; it is reported in its place
        return _failed(exc), None
    finally:
        if free:
            _free(inputs.device)
    return _judged(verdict), calls if verdict.ok else None


def _checked_again(inputs: Inputs, calls: _Right, clock: Clock, *, whole: bool) -> Measured | None:
    """What is wrong with who was right before it was timed."""
    try:
        result = calls.last()
        clock.synchronise()
        verdict = check(inputs.only(inputs.count - 1), result, whole=whole)
    except Exception as exc:  # noqa: BLE001 - a library may raise anything; it is reported in its place
        return _failed(exc)
    if verdict.ok:
        return None
    reason = f"when it had been timed, of the last input set: {verdict.reason}"
    return dataclasses.replace(_judged(verdict), reason=reason)


def _failed(exc: Exception) -> Measured:
    if isinstance(exc, UnsupportedRequestError):
        return Measured(kind="refused", reason=str(exc).partition("\n")[0])
    reason = without_folders(" ".join(f"{type(exc).__name__}: {exc}".split()))[:400]
    return Measured(kind="memory" if out_of_memory(exc) else "failed", reason=reason)


def without_folders(text: str) -> str:
    """`text` with files by their names alone: where a library was built says nothing, and results are published."""
    return _FOLDERS.sub("", text)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether that is what it comes from. On a CPU, and from a library's calls of CUDA, it has no class of its own."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def _judged(verdict: Verdict) -> Measured:
    return Measured(kind="" if verdict.ok else "wrong", reason=verdict.reason, margin=verdict.margin)


def _calls(inputs: Inputs, call: Call, clock: Clock, *, recorded: bool) -> tuple[_Right, Any]:
    """(its calls, their result of set 0)."""
    calls: Sequence[Callable[[], Any]] = [functools.partial(call, number) for number in range(inputs.count)]
    if recorded:
        timing, results = clock.graph(calls)
        # Of a graph, every replay writes them anew.
        return _Right(timing, (lambda: results[-1]) if clock.on_gpu else calls[-1]), results[0]
    return _Right(functools.partial(clock.calls, calls), calls[-1]), call(0)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory(device: torch.device, call: Callable[[], Any]) -> int:
    """Bytes that one call takes beside what is there before it, its result included; 0 where torch does not count."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before
