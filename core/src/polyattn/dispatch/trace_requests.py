"""Which requests a program makes, at which lengths, and how often: `polyattn trace` writes it, `polyattn tune` reads.

Calls are wrapped when they are bound, and only while somebody records: off, this costs nothing.
A line of the file is one request in one bucket of lengths, as JSON: `request`, `lengths` of the first call of its kind,
`count`, and `backend`, who served it. Equal lines, of one process or several, are added up by the reader.

A process adds a line when a request first appears and each time its count has doubled, and the rest when it ends: one
that is killed, or leaves by `os._exit`, has every request in the file, with more than half of its calls.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch

from ..contract import AttentionRequest, Bound, Session, Slot
from ..contract.lengths import Extent, extent_of
from ..contract.request_json import plain_request
from ..envvars import text
from ..epoch import EPOCH, bump
from ..errors import ConfigError
from ..selection.inspection import served_by
from ..selection.select import Selection
from ..tuning import bucket

__all__ = ["CallLengths", "lengths_of", "observed", "opaque", "record_to", "recording", "stop"]

CallLengths = tuple[Sequence[tuple[int, int]], int]
"""(S_q, S_k) of each sequence, and the tokens of a prefix that all share."""

_Who = str | Callable[[Extent], str]
_ADD = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)  # a pipe that nobody reads would be waited for


@dataclasses.dataclass
class _Entry:
    """backend: who serves since epoch number `epoch`. written: of its count, how many calls are in the file."""

    request: AttentionRequest
    lengths: CallLengths
    backend: str
    epoch: int
    count: int = 0
    written: int = 0


class _Recorder:
    """What this process asked for so far.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the program may change its folder
        self._entries: dict[tuple[AttentionRequest, Extent], _Entry] = {}
        self._lock = threading.Lock()
        self._lost = False
        try:
            os.close(os.open(self.path, _ADD | os.O_CREAT, 0o644))
        except OSError as exc:
            raise ConfigError(
                f"requests cannot be recorded to {path}: {exc}; name a file in a folder that is there"
            ) from exc

    def note(self, request: AttentionRequest, backend: _Who, extent: Extent, read: Callable[[], CallLengths]) -> None:
        """One call. read: the lengths of its sequences, asked for once for each bucket. One without queries or without
        keys is no work, and there is nothing to measure."""
        if 0 in extent:
            return
        name = (request, (bucket(extent[0]), bucket(extent[1]), bucket(extent[2])))
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry.epoch != EPOCH.value:
                who = backend if isinstance(backend, str) else backend(extent)
                if entry is None:
                    entry = self._entries[name] = _Entry(request, read(), who, EPOCH.value)
                entry.backend, entry.epoch = who, EPOCH.value  # what was measured meanwhile may have changed it
            entry.count += 1
            if entry.count >= 2 * entry.written:
                self._add([entry])

    def forget(self) -> None:
        """Begin with nothing."""
        self._entries, self._lock = {}, threading.Lock()

    def write(self) -> None:
        """Add what is not in the file yet."""
        with self._lock:
            self._add(entry for entry in self._entries.values() if entry.count > entry.written)

    def _add(self, entries: Iterable[_Entry]) -> None:
        """Lines at the end of the file, in one piece: other processes may write to it at the same time."""
        lines = b"".join(map(_line, entries))
        if not lines or self._lost:
            return
        try:
            # Without O_CREAT: `polyattn trace` moves the file when its program ends, and what outlives that program
            # shall not begin another. Opened each time: a program may close every file that it does not know.
            handle = os.open(self.path, _ADD)
            try:
                os.write(handle, lines)
            finally:
                os.close(handle)
        except OSError as exc:
            self._lost = True
            warnings.warn(
                f"{self.path} cannot be written, so requests from here on are not recorded: {exc}",
                RuntimeWarning,
                stacklevel=2,
            )


def _line(entry: _Entry) -> bytes:
    """Of the calls that are not in the file yet, which they count as from here on."""
    (lengths, shared), count = entry.lengths, entry.count - entry.written
    entry.written = entry.count
    line = {
        "request": plain_request(entry.request),
        "lengths": [list(pair) for pair in lengths],
        **({"shared": shared} if shared else {}),
        "count": count,
        "backend": entry.backend,
    }
    return (json.dumps(line) + "\n").encode()


_recorder: _Recorder | None = None


def recording() -> bool:
    """Whether calls are recorded."""
    return _recorder is not None


def record_to(path: str | Path) -> None:
    """Record the calls of this process, and of those that it forks, from here on, until `stop`.

    Raises:
        ConfigError: the file cannot be written.
    """
    global _recorder
    stop()
    _recorder = _Recorder(Path(path))
    bump()


def stop() -> None:
    """Write the rest of what was recorded, and record no more."""
    global _recorder
    if _recorder is not None:
        recorder, _recorder = _recorder, None
        recorder.write()
        bump()


def observed(bound: Bound, request: AttentionRequest, by: _Who | Selection) -> Bound:
    """The functions of a choice, recorded where somebody does.

    Args:
        request: that they were chosen for. by: who serves it, or calls of these lengths.
    """
    recorder = _recorder
    if recorder is None or request.zero_size:
        return bound
    backend = served_by(by) if isinstance(by, Selection) else by
    asked = dataclasses.replace(request, options=(), graph_capture=False)
    extent = extent_of(asked)

    def forward(*tensors: Any, **keywords: Any) -> Any:
        found = extent(*tensors, **keywords)
        recorder.note(asked, backend, found, lambda: lengths_of(found, keywords))
        return bound.forward(*tensors, **keywords)

    def session(slot: Slot) -> Session:
        assert bound.session is not None
        return _Observed(bound.session(slot), asked, backend, recorder)

    planned = None if bound.session is None else session
    return dataclasses.replace(bound, forward=forward, simple=None, session=planned)


def opaque(bound: Bound) -> Bound:
    """For compiled code, which cannot be recorded from inside: while somebody records, calls go through a custom op."""
    return bound if _recorder is None else dataclasses.replace(bound, traceable=False)


class _Observed:
    """A session whose steps are recorded, each once for all layers that share it."""

    def __init__(self, inner: Session, request: AttentionRequest, backend: _Who, recorder: _Recorder) -> None:
        self._inner, self._request, self._backend, self._recorder = inner, request, backend, recorder
        self.prepare, self.forward = inner.prepare, inner.forward

    def plan(self, step: Any) -> None:
        extent = (step.sequences, step.max_seqlen_q, step.max_seqlen_k)
        tables = {"cu_seqlens_q": step.host("cu_seqlens_q"), "seq_lens": step.host("seq_lens")}
        self._recorder.note(self._request, self._backend, extent, lambda: lengths_of(extent, tables))
        self._inner.plan(step)


def lengths_of(extent: Extent, keywords: Mapping[str, Any]) -> CallLengths:
    """Of the sequences that have any, read from the tensors where that is possible."""
    batch, s_q, s_k = extent
    shared = sum(part.max_seqlen_k for part in keywords.get("kv_parts", ()))
    tables = keywords.get("tables")
    keywords = keywords if tables is None else tables._asdict()
    starts = keywords.get("cu_seqlens_q")
    if starts is None or (starts.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return [(s_q, s_k)] * batch, shared
    queries = starts.diff().tolist()
    lens = keywords.get("seq_lens")
    keys = keywords["cu_seqlens_k"].diff().tolist() if lens is None else lens.tolist()
    return [pair for pair in zip(queries, keys, strict=True) if min(pair) > 0] or [(s_q, s_k)], shared


def _forked() -> None:
    """What the parent recorded is the parent's."""
    if _recorder is not None:
        _recorder.forget()


def _finish_worker(write: Callable[[], None]) -> None:
    """A forked worker of multiprocessing leaves by `os._exit`: atexit is never asked, its finalizers are."""
    util.Finalize(None, write, exitpriority=0)


def _write() -> None:
    if _recorder is not None:
        _recorder.write()


def _begin() -> None:
    """Record from the start, if that was asked for. A program that asked for attention is not to fail for it."""
    if path := text("POLYATTN_TRACE"):
        try:
            record_to(path)
        except ConfigError as exc:
            warnings.warn(f"POLYATTN_TRACE: {exc}. Nothing is recorded", RuntimeWarning, stacklevel=2)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
util.register_after_fork(_write, _finish_worker)
atexit.register(stop)
_begin()
