"""Trying a backend where it can do no harm: in a process of its own, which may crash or hang.

One process serves many probes, one after another; when it dies, the backend that was being tried is to blame, and the
next probe starts a new one. Run as `python -m polyattn.bench.measure.probe` it is that process: a JSON line in, one
out. It ends when its parent does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import IO, Any

from ...errors import BackendUnavailableError, ConfigError, InvalidInputError, PolyattnError
from .workload import Workload

__all__ = ["HANG_SECONDS", "Prober", "serve"]

_MARK = "polyattn-probe:"
"""Begins the lines that are answers: what starts with Python may print before they have the pipe to themselves."""
_READY = "ready"
_NO_PROCESS = "no process can be started to try backends in"
_PR_SET_PDEATHSIG = 1
_START_SECONDS = 300.0
"""To import torch, on a machine that has other things to do."""
_WINDOW = 0.001
"""Seconds of timing, which nobody reads."""
HANG_SECONDS = 60.0
"""Who does not finish in a shorter time than that may only be slow, or be compiled first."""


class Prober:
    """Tries backends in a process beside this one.

    Args:
        device: of torch. seconds: after so long the process of a backend is ended, which is said to hang if that is
            `HANG_SECONDS` or more.

    Raises:
        InvalidInputError: seconds that are none.
    """

    def __init__(self, device: str, seconds: float = 180.0) -> None:
        if not 0 < seconds < math.inf:
            raise InvalidInputError(
                f"probe_seconds={seconds}: who is tried in a process of its own has a finite number of seconds above "
                f"0; 180 are usual, and below {HANG_SECONDS:g} nobody is said to hang"
            )
        self.device, self.seconds = device, seconds
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None]
        self._errors: IO[str]

    def __enter__(self) -> Prober:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def examine(self, workload: Workload, backend: str, deadline: float = math.inf) -> tuple[str, str]:
        """(what is wrong: a `running.Trouble`, crashed or hung; the reason for people).

        Args:
            deadline: `time.monotonic()` after which its process is ended too. Who has no answer then is `late`.

        Raises:
            BackendUnavailableError: there can be no such process.
            ConfigError: the process could not make out what it was to try: nothing is known of the backend then.
        """
        process = self._started(deadline)
        limit = min(self.seconds, deadline - time.monotonic())
        if process is None or limit <= 0:
            return "late", "the time was up before it was tried"
        assert process.stdin is not None
        asked = {"workload": workload.plain(), "backend": backend, "device": self.device}
        try:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            answer = self._answers.get(timeout=min(limit, threading.TIMEOUT_MAX))
        except BrokenPipeError:
            answer = None
        except queue.Empty:
            self.close()
            said = f"it did not finish within {limit:.3g} s, and its process was ended"
            return (
                ("hung", said)
                if limit >= HANG_SECONDS
                else ("late", f"{said}; below {HANG_SECONDS:g} s that is no hang")
            )
        if answer is None:
            return self._death()
        found = json.loads(answer)
        if "error" in found:
            raise ConfigError(f"the process that tries backends did not try {backend}: {found['error']}")
        return found["kind"], found["reason"]

    def _started(self, deadline: float) -> subprocess.Popen[str] | None:
        """The process; None where it was not ready before the deadline."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        limit = min(_START_SECONDS, deadline - time.monotonic())
        if limit <= 0:
            return None
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the process
        # The process imports what this one does, from the same places.
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environ.pop("POLYATTN_TRACE", None)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env={**environ, "POLYATTN_TUNING": "off"},
            )
        except (OSError, TypeError, ValueError) as exc:  # there is no such file, or None; no room for a process
            self._errors.close()
            raise BackendUnavailableError(f"{_NO_PROCESS}: {sys.executable} cannot be run ({exc})") from exc
        self._answers = queue.Queue()
        threading.Thread(target=_read, args=(self._process, self._answers), daemon=True).start()
        try:
            ready = self._answers.get(timeout=limit)
        except queue.Empty:
            if limit < _START_SECONDS:
                self.close()
                return None
            ready = "late"
        if ready is None or ready.strip() != _READY:
            said = "it was not ready in time" if ready else self._death()[1]
            self.close()
            raise BackendUnavailableError(f"{_NO_PROCESS}: {said}")
        return self._process

    def _death(self) -> tuple[str, str]:
        """How the process ended: (crashed or memory, what it was ended by, with the last thing it said)."""
        process = self._process
        assert process is not None
        code = process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        self.close()
        if code < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
                if name == "SIGKILL":  # not by us: a system ends so who takes the memory of all
                    return "memory", f"its process was ended by SIGKILL, as where memory runs out{_last(said)}"
                return "crashed", f"its process was ended by {name}{_last(said)}"
        return "crashed", f"its process ended with exit code {code}{_last(said)}"

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._errors.close()


def _last(said: list[str]) -> str:
    return f": {said[-1][:200]}" if said else ""


def _read(process: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
    """Answers of a process until it ends; then None."""
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # it was closed
        for line in process.stdout:
            if line.startswith(_MARK):
                answers.put(line.removeprefix(_MARK))
    answers.put(None)


def serve(lines: Iterable[str], answers: IO[str]) -> None:
    """Answer probes until there are no more."""
    import torch

    from .clock import Clock, made_current
    from .entrants import candidates
    from .inputs import Inputs, make_inputs
    from .running import forms, measure, without_inputs

    # On a line of its own, whatever was written before.
    print(f"\n{_MARK}{_READY}", file=answers, flush=True)
    made: tuple[Any, Inputs] | None = None
    for line in lines:
        asked = json.loads(line)
        try:
            workload, device = Workload.of(asked["workload"], "probe"), torch.device(asked["device"])
            candidate = next((c for c in candidates(workload, device) if c.name == asked["backend"]), None)
            if candidate is None:
                raise ConfigError(f"it does not take {workload.id} there")
            if made is None or made[0] != workload:
                made = None  # before there are others
                made = (workload, make_inputs(workload, device))
        except PolyattnError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"kind": "memory", "reason": without_inputs(error)}
            if not answer["reason"]:
                raise
        else:
            # Each way it is called in when it is timed: who does it once may not do it twice, or for other lengths.
            clock = Clock(device, _WINDOW)
            with made_current(device):
                found = measure(made[1], [candidate], clock=clock, rounds=1, **forms(workload))[candidate.name]
            answer = {"kind": found.kind, "reason": found.reason}
        print(f"{_MARK}{json.dumps(answer)}", file=answers, flush=True)


def _own_pipe() -> IO[str]:
    """The pipe to the parent, for answers alone: what libraries write to standard output joins the errors."""
    sys.stdout.flush()
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "w", encoding="utf-8")


def _lines() -> Iterator[str]:
    """Yield the lines of standard input. When that ends the process does, whatever it is doing: nobody is there to read
    of it."""
    if sys.platform == "linux":
        # What never lets another thread run is ended with the thread of the parent that waits for it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        rest = b""
        while piece := os.read(0, 65536):
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                lines.put(line.decode())
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


if __name__ == "__main__":
    serve(_lines(), _own_pipe())
