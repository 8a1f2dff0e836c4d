"""This module records which backend a process ran when it ended: marks beside the store, which the next start finds.

A backend may be right in a process of its own and end the one that measures. Its mark is a small file, locked as long
as somebody measures: an unlocked one that says "running" is of a process that ended meanwhile. That may be somebody
else's doing, so only who was running twice is to blame.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

__all__ = ["Marks", "forgive", "orderly"]

_STRIKES = 2
_RUNNING, _IDLE = b"1", b"0"
_USED: set[Marks] = set()
"""Those of this process, as long as somebody measures with them."""
_CLOSING = threading.Lock()
"""Held where files are closed: nobody writes to one whose number another file may have by then."""


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, so that its marks are taken back: schedulers end what takes too long with
    it, and that is not the doing of whoever is being run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def forgive() -> None:
    """Clear the marks of this process: an interrupt ends it, and the backends that it runs are not to blame."""
    with _CLOSING:
        for marks in _USED:
            marks.forgiving = True
            for _, handle in marks._open.values():
                os.pwrite(handle, _IDLE, 0)


class Marks:
    """
    Args:
        store: the store's file; None: there are no marks, as where files cannot be locked or written.
        subjects: name of a backend -> the text that says what is measured of it, and where.

    Attributes:
        blamed: who was running when processes ended, `_STRIKES` times. Their marks are gone.
        forgiving: nobody is marked from here on, see `forgive`.
    """

    forgiving = False

    def __init__(self, store: Path | None, subjects: Mapping[str, str]) -> None:
        self._store, self._subjects = store, subjects
        self._open: dict[str, tuple[Path, int]] = {}
        self.blamed: list[str] = []

    def __enter__(self) -> Marks:  # noqa: PYI034 - Self is not in Python 3.10
        for name, subject in self._subjects.items() if self._store is not None else ():
            # A mark is a help: where there can be none, one measures without, and the store says what it cannot write.
            with contextlib.suppress(ImportError, OSError):
                self._take(name, subject)
        with _CLOSING:
            _USED.add(self)
        return self

    def _take(self, name: str, subject: str) -> None:
        import fcntl  # not on Windows

        assert self._store is not None
        folder = self._store.with_name(self._store.name + ".running")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / hashlib.sha256(subject.encode()).hexdigest()[:24]
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where another process measures the same
            state, kept = os.pread(handle, 1, 0), os.pread(handle, 1, 1)
            # A damaged mark is none: it is a help, and nobody is blamed by it.
            strikes = (int(kept) if kept.isdigit() else 0) + (state == _RUNNING)
            os.pwrite(handle, _IDLE + str(strikes).encode(), 0)
        except OSError:
            os.close(handle)
            raise
        if strikes < _STRIKES:
            self._open[name] = path, handle
            return
        self.blamed.append(name)
        path.unlink(missing_ok=True)
        os.close(handle)

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """While a backend is run."""
        if name not in self._open or self.forgiving:
            yield
            return
        _, handle = self._open[name]
        os.pwrite(handle, _RUNNING, 0)
        try:
            yield
        finally:
            os.pwrite(handle, _IDLE, 0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _CLOSING:
            _USED.discard(self)
            for path, handle in self._open.values():
                path.unlink(missing_ok=True)
                os.close(handle)
                with contextlib.suppress(OSError):  # there are others in it
                    path.parent.rmdir()
            self._open = {}
