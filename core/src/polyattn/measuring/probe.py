"""Trying a backend where it can do no harm: in a process of its own, which may crash or hang.

One process serves many probes, one after another; when it dies, the backend that was being tried is to blame, and the
next probe starts a new one. Run as `python -m polyattn.measuring.probe` it is that process: a JSON line in, one out.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from types import TracebackType
from typing import IO, Any

from ..errors import BackendUnavailableError, ConfigError, PolyattnError
from .workload import Workload

__all__ = ["Prober", "serve"]

_MARK = "polyattn-probe:"
"""Begins the lines that are answers: libraries print what they like."""
_READY = "ready"
_START_SECONDS = 300.0
"""To import torch, on a machine that has other things to do."""


class Prober:
    """Tries backends in a process beside this one.

    Args:
        device: of torch. seconds: after so long a backend is said to hang, and its process is ended.
    """

    def __init__(self, device: str, seconds: float = 180.0) -> None:
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

    def examine(self, workload: Workload, backend: str) -> tuple[str, str]:
        """(what is wrong: a `running.Trouble`, crashed or hung; the reason for people).

        Raises:
            BackendUnavailableError: there can be no such process.
            ConfigError: the process could not make out what it was to try: nothing is known of the backend then.
        """
        process = self._started()
        assert process.stdin is not None
        asked = {"workload": workload.plain(), "backend": backend, "device": self.device}
        try:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            answer = self._answers.get(timeout=self.seconds)
        except BrokenPipeError:
            answer = None
        except queue.Empty:
            self.close()
            return "hung", f"it did not finish within {self.seconds:g} s, and its process was ended"
        if answer is None:
            return self._death()
        found = json.loads(answer)
        if "error" in found:
            raise ConfigError(f"the process that tries backends did not try {backend}: {found['error']}")
        return found["kind"], found["reason"]

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the process
        # The process imports what this one does, from the same places.
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environ.pop("POLYATTN_TRACE", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**environ, "POLYATTN_TUNING": "off"},
        )
        self._answers = queue.Queue()
        threading.Thread(target=_read, args=(self._process, self._answers), daemon=True).start()
        try:
            ready = self._answers.get(timeout=_START_SECONDS)
        except queue.Empty:
            ready = "late"
        if ready is None or ready.strip() != _READY:
            said = "it was not ready in time" if ready else self._death()[1]
            self.close()
            raise BackendUnavailableError(f"no process can be started to try backends in: {said}")
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


def serve(lines: IO[str]) -> None:
    """Answer probes until the input ends."""
    import torch

    from .entrants import candidates
    from .inputs import Inputs, make_inputs
    from .running import examine, out_of_memory

    print(f"{_MARK}{_READY}", flush=True)
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
                made = (workload, make_inputs(workload, device, sets=1))
        except PolyattnError as error:
            answer = {"error": str(error)}
        except Exception as error:
            if not out_of_memory(error):
                raise
            answer = {"kind": "memory", "reason": f"no room for its inputs: {error}"}
        else:
            found = examine(made[1], candidate)
            answer = {"kind": found.kind, "reason": found.reason}
        print(f"{_MARK}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    serve(sys.stdin)
