"""Measuring several entrants beside one another: each is checked before it is timed, and all are timed in rounds."""

from __future__ import annotations

import dataclasses
import errno
import functools
import gc
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypedDict

import torch

from ...errors import InvalidInputError, UnsupportedRequestError
from .checking import Verdict, check
from .clock import ROUNDS, Clock, Time, Timing, interleaved
from .entrants import Call, Entrant
from .inputs import Inputs, make_inputs
from .workload import Workload

__all__ = ["Measured", "estimated", "examine", "forms", "measure", "out_of_memory", "peak_memory", "without_inputs"]

_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"]+/)+(?=[^\s/'\"])")

_NO_MEMORY = ("DefaultCPUAllocator: ", "CUDA error: out of memory")
"""Texts of errors that say so."""
_TOO_LARGE = "Storage size calculation overflowed"
"""Torch's words of what no memory could hold."""

_ISSUED, _ISSUE_ROUNDS = 9, 3
"""Calls of one entrant issued at once, and how often."""
_HOST_MOST = 0.01
"""Seconds of a call, beside which those of issuing it say nothing."""

_SHORTER, _SHORTEST = (64, 8), 16
"""Times shorter are the sequences that an estimate is made from, the shorter ones first; and no shorter than that."""
_ESTIMATING = 0.05
"""Share of the time that one call may take that only serves an estimate."""

Trouble = Literal["", "refused", "memory", "late", "wrong", "failed"]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Describes the result of a candidate.

    Attributes:
        time: of one call, None where it was not timed. margin: of the check, 1 is all that is allowed.
        host: until one call returns, while nobody waits for it; None where nobody asked, or beside a far longer `time`.
        kind: why it was not: it `refused`, there was not `memory` enough, it was too `late` for it, its result was
            `wrong`, or it `failed` in another way. reason: the same for people.
    """

    time: Time | None = None
    host: Time | None = None
    kind: Trouble = ""
    reason: str = ""
    margin: float = 0.0


_LATE = Measured(kind="late", reason="the time was up before it was timed")


def measure(
    inputs: Inputs,
    entrants: Iterable[Entrant],
    *,
    clock: Clock,
    rounds: int = ROUNDS,
    recorded: bool = False,
    issued: bool = False,
    late: Callable[[], bool] = lambda: False,
    strict: bool = False,
    ready: Callable[[], None] = lambda: None,
    running: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    whole: bool = False,
) -> dict[str, Measured]:
    """Check entrants and time those that are right; then check them once more, on another input set: who is right only
    at first, or of one set, is not.

    Args:
        rounds: how often everybody is timed; the middle counts.
        recorded: into a device graph of one call for each input set, as an engine replays a decode step.
        issued: also what a call costs the host.
        late: whether the time is up: no other round begins then. strict: nor is anybody else checked or timed.
        ready: called when all are checked, before the first is timed.
        running: entered with the name of an entrant while it is run.
        whole: all of a result is compared (`checking.check`).
    """
    found: dict[str, Measured] = {}
    right: dict[str, _Right] = {}
    for entrant in (entrants := list(entrants)):
        if strict and late():
            found[entrant.name] = _LATE
            continue
        with running(entrant.name):
            said, calls = _examined(inputs, entrant, clock, recorded=recorded, whole=whole)
        found[entrant.name] = said
        if calls is not None:
            right[entrant.name] = calls
    ready()
    timings = {name: _marked(calls.timing, running, name) for name, calls in right.items()}
    times = interleaved(timings, rounds, late, settle=clock.on_gpu, strict=strict)
    for name, calls in right.items():
        if name not in times:
            found[name] = _LATE
            continue
        with running(name):
            wrong = _checked_again(inputs, calls, clock, whole=whole)
        found[name] = wrong if wrong is not None else dataclasses.replace(found[name], time=times[name])
    if issued and (clock.on_gpu or inputs.grows):  # elsewhere the times are of whole calls, which were waited for
        _issue(inputs, entrants, found, clock, late, strict, running)
    return found


def _marked(timing: Timing, running: Callable[[str], AbstractContextManager[None]], name: str) -> Timing:
    def take() -> Time:
        with running(name):
            return timing()

    return take


def _issue(
    inputs: Inputs,
    entrants: Sequence[Entrant],
    found: dict[str, Measured],
    clock: Clock,
    late: Callable[[], bool],
    strict: bool,
    running: Callable[[str], AbstractContextManager[None]],
) -> None:
    """Add what calls cost the host.

    Where keys grow, each length is used once over all candidates: some libraries build a plan for each new length, and
    share it between candidates.
    """
    timings: dict[str, _Issues] = {}
    for number, entrant in enumerate(entrants):
        took = found[entrant.name].time
        if took is not None and took.seconds <= _HOST_MOST:
            count = 1 + _ISSUED * _ISSUE_ROUNDS
            given = inputs.growing(number * count, count) if inputs.grows else inputs
            timings[entrant.name] = _Issues(given, entrant, clock)
    marked = {name: _marked(timing, running, name) for name, timing in timings.items()}
    times = interleaved(marked, _ISSUE_ROUNDS, late, strict=strict)
    for name, took in times.items():
        error = timings[name].error
        # With the host's time of some alone, the others would look cheaper than they are.
        host = took if len(times) == len(timings) else None
        found[name] = dataclasses.replace(found[name], host=host) if error is None else _failed(error)


class _Issues:
    """Times the host, on the next sets in turn. A candidate that was right at one length may fail at another: its time
    is infinite."""

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


def estimated(workload: Workload, entrant: Entrant, clock: Clock, within: float) -> float:
    """Seconds of one call, from calls of shorter sequences, which are not checked; 0 where that does not tell.

    Args:
        within: seconds. Where one call takes far longer than that by the shortest ones, none longer is made.
    """
    found = 0.0
    for factor in _SHORTER:
        shorter = _shorter(workload, factor)
        if shorter is None:
            continue
        share = _pairs(shorter) / _pairs(workload)
        if found * share > within * _ESTIMATING:
            break
        try:
            call = entrant.prepare(make_inputs(shorter, clock.device, 1))
            call(0)
            clock.synchronise()
            began = time.perf_counter()
            call(0)
            clock.synchronise()
        except Exception:  # noqa: BLE001 - what is wrong with it is said when it is checked
            return 0.0
        found = (time.perf_counter() - began) / share
    return found


def _pairs(workload: Workload) -> int:
    """Count the pairs of a query and a key: what attention is proportional to."""
    return sum(s_q * (s_k + workload.shared) for s_q, s_k in workload.lengths)


def _shorter(workload: Workload, factor: int) -> Workload | None:
    if workload.longest[1] < _SHORTEST * factor:
        return None
    lengths = tuple((max(s_q // factor, 1), max(s_k // factor, 1)) for s_q, s_k in workload.lengths)
    try:
        return dataclasses.replace(workload, lengths=lengths, shared=workload.shared // factor)
    except InvalidInputError:
        return None  # the request does not have such lengths


class Forms(TypedDict):
    """Arguments of `measure`."""

    recorded: bool
    issued: bool


def forms(workload: Workload) -> Forms:
    """How calls of a workload are timed."""
    captured = workload.request.graph_capture
    # A layer of a step that goes into a graph is timed as it is replayed.
    return {"recorded": captured == "session", "issued": not captured}


def examine(inputs: Inputs, entrant: Entrant) -> Measured:
    """Return whether an entrant's result is right, without timing it."""
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
    """Return what is wrong with who was right before it was timed."""
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
    """Return whether an error comes from a lack of memory. On a CPU, and from a library's calls of CUDA, such errors
    have no class of their own; for a pool on a CPU the operating system reports it."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def without_inputs(error: Exception) -> str:
    """Say why there are no inputs, for people; "" where the error is of something else."""
    line = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    if out_of_memory(error):
        return f"no room for its inputs: {line}"
    return f"its inputs cannot be made: {line}" if isinstance(error, OverflowError) or _TOO_LARGE in line else ""


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
