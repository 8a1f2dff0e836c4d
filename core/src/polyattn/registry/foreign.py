"""Run the code of strangers: what it raises is its own fault, what a person or the host raises into it is not, and who
takes long is named."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["OWN", "SLOW_S", "OwnRun", "Run", "loading"]

log = logging.getLogger("polyattn.plugins")

SLOW_S = 2.0
"""Seconds after which a plugin that has not come back is named."""

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGBREAK")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_here = threading.local()


def loading() -> Run | None:
    """The load of a plugin that goes on in this thread, if any: its code is what asks."""
    found: Run | None = getattr(_here, "load", None)
    return found


class Run:
    """A stretch of a stranger's code; `ended_by_host` tells what it raised from what was raised into it::

        with Run("plugin acme", "its hook") as run:
            try:
                hook()
            except BaseException as exc:
                if run.ended_by_host(exc):
                    raise
                report(exc)

    Args:
        who: the plugin, for the line that is logged after `SLOW_S` seconds; "" logs none.
        doing: what it does. advice: how to go on without it.
        load: it is being loaded, so that it cannot ask polyattn for anything yet.

    Attributes:
        refused: what it was told when it asked all the same, which it may have caught.
    """

    def __init__(self, who: str = "", doing: str = "", advice: str = "", *, load: bool = False) -> None:
        self.who, self.doing, self.advice, self.load = who, doing, advice, load
        self.refused: Exception | None = None
        self._raised: list[BaseException] = []
        self._handlers: dict[int, tuple[Any, Any]] = {}
        self._unknown = False
        self._done = threading.Event()
        self._watch: threading.Thread | None = None

    def __enter__(self) -> Run:  # noqa: PYI034 - typing has Self from Python 3.11 on
        self._outer = loading()
        if self.load:
            _here.load = self
        # Only the main thread is interrupted by signals, and only it may look after them.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._note(number)
        if self.who:
            watch = threading.Thread(target=self._tell, name="polyattn-slow-plugin", daemon=True)
            try:
                watch.start()
                self._watch = watch
            except RuntimeError as exc:  # no more threads: what is lost is a line of the log
                log.debug("%s is not watched: %s", self.who, exc)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _here.load = self._outer
        for number, (ours, before) in self._handlers.items():
            if signal.getsignal(number) is ours:  # else the stranger has put its own there, on top
                signal.signal(number, before)
        self._done.set()
        if self._watch is not None:
            self._watch.join()

    def ended_by_host(self, exc: BaseException) -> bool:
        """Return whether an exception came from outside: a person's Ctrl-C, or what a signal handler of the host
        raised. What is an `Exception` never is."""
        if isinstance(exc, Exception):
            return False
        if self._unknown and isinstance(exc, KeyboardInterrupt):
            return True
        seen: BaseException | None = exc
        while seen is not None:
            if any(seen is one for one in self._raised):
                return True
            seen = seen.__cause__ or seen.__context__
        return False

    def _note(self, number: int) -> None:
        """Put a handler around the one that is there, which remembers what that raises."""
        before = signal.getsignal(number)
        if not callable(before):
            # A handler that C code installed cannot be put back, so it stays, and nobody knows when it ran.
            self._unknown |= before is None and number == signal.SIGINT
            return
        handler = _remembering(before, self._raised)
        try:
            signal.signal(number, handler)
        except ValueError:  # an interpreter beside the main one
            self._unknown = True
        else:
            self._handlers[number] = handler, before

    def _tell(self) -> None:
        if not self._done.wait(SLOW_S):
            log.warning("%s: %s has taken %g s so far. %s", self.who, self.doing, SLOW_S, self.advice)


class OwnRun:
    """Stands for a `Run` around core's own code: it reports nothing and handles no signal."""

    refused = None

    def __enter__(self) -> OwnRun:  # noqa: PYI034 - as above
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ended_by_host(self, exc: BaseException) -> bool:
        """Core raises nothing else by itself."""
        return not isinstance(exc, Exception)


OWN = OwnRun()


def _remembering(before: Callable[..., Any], raised: list[BaseException]) -> Callable[[int, FrameType | None], Any]:
    def handler(number: int, frame: FrameType | None) -> Any:
        try:
            return before(number, frame)
        except BaseException as exc:
            raised.append(exc)
            raise

    return handler
