"""This module reads what `polyattn.dispatch.trace_requests` recorded as workloads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from ...tuning.rows import canonical
from ...user_files import MEGABYTE, read_text
from .workload import Workload

__all__ = ["Traced", "read_line", "read_trace"]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A workload of a program: how often it was asked for, and who served it (last, where that changed)."""

    workload: Workload
    count: int
    backend: str


def read_trace(paths: Sequence[str | Path]) -> list[Traced]:
    """The workloads of one or several traces, the most frequent first; equal ones are added up.

    Raises:
        ConfigError: a file cannot be read, or a line is none; the message has its number.
    """
    found: dict[str, Traced] = {}
    for path in map(Path, paths):
        try:
            lines = read_text(path, 64 * MEGABYTE).splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"the trace {path} cannot be read: {exc}") from exc
        for number, line in enumerate(lines, 1):
            one = read_line(line, f"{path}, line {number}")
            key = canonical(one.workload.key())
            if (known := found.get(key)) is not None:
                one = dataclasses.replace(known, count=known.count + one.count, backend=one.backend)
            found[key] = one
    return sorted(found.values(), key=lambda one: -one.count)


def read_line(line: str, where: str) -> Traced:
    """The workload of a line of a trace.

    Raises:
        ConfigError: it is none; `where` begins the message.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as exc:  # no JSON, a number of thousands of digits, lists without end
        raise ConfigError(f"{where}: not JSON ({exc}); `polyattn trace` writes one object per line") from exc
    workload = Workload.of(data, where)
    count, backend = data.get("count"), data.get("backend")
    if type(count) is not int or count < 1 or not isinstance(backend, str):
        raise ConfigError(f"{where}: count={count!r}, backend={backend!r}; a number above 0 and a name are needed")
    return Traced(workload, count, backend)
