"""Expected failures: a plugin's `xfails.txt`, beside its module.

One line for each case that is known to fail, with the reason or a link behind a `#`:

    acme@npu:dense-float16-*-grad=query_key_value*  # the vendor's backward ignores the mask, https://...

The pattern is a case id, or a glob of them (`*`, `?`). The backend before the colon, with or without its platform, may
be left out where the plugin has one backend. Expectations are strict: a case that passes after all is a failure, and so
is a line that matches no case of a full run.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable
from pathlib import Path

from ..contract import BackendInfo
from ..errors import ConfigError
from ..registry.manager import get_manager
from ..user_files import MEGABYTE, read_text

__all__ = ["NAME", "Expected", "expected_of", "no_unmatched", "read_xfails"]

NAME = "xfails.txt"


@dataclasses.dataclass(frozen=True)
class Expected:
    """Describes one line: cases that are expected to fail, and why. `where`: the file's name and the line's number."""

    pattern: str
    reason: str
    where: str

    def matches(self, case: str) -> bool:
        return fnmatch.fnmatchcase(case, self.pattern)


def read_xfails(backend: BackendInfo) -> tuple[Expected, ...]:
    """The lines about one backend; none where its plugin has no such file.

    Raises:
        ConfigError: a line without a case or a reason, or about a backend that the plugin does not have.
    """
    manager = get_manager()
    plugin = manager.owner(backend)
    path = Path(plugin.origin).parent / NAME
    if not plugin.origin or not path.is_file():
        return ()
    try:
        lines = read_text(path, MEGABYTE).splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{NAME} of plugin {plugin.name} cannot be read: {exc}") from exc
    found = []
    for number, line in enumerate(lines, 1):
        text, _, reason = (part.strip() for part in line.partition("#"))
        where = f"{NAME}, line {number}"
        if not text:
            continue
        if not reason:
            raise ConfigError(f"{where} of plugin {plugin.name}: {text!r} has no reason. Write: CASE  # reason or link")
        whose, colon, pattern = text.rpartition(":")
        if colon and not pattern:
            raise ConfigError(f"{where} of plugin {plugin.name}: {text!r} names no case. Write: {whose}:CASE  # reason")
        own = {word for name in plugin.backends for word in (name, name.partition("@")[0])}
        if whose and whose not in own:
            raise ConfigError(
                f"{where} of plugin {plugin.name}: it has no backend {whose!r}. Its backends: "
                f"{', '.join(plugin.backends)}"
            )
        if whose in ("", backend.name, backend.id):
            found.append(Expected(pattern, reason, where))
    return tuple(found)


def expected_of(case: str, lines: Iterable[Expected]) -> Expected | None:
    """The first line that matches a case."""
    return next((line for line in lines if line.matches(case)), None)


def no_unmatched(lines: Iterable[Expected], cases: Iterable[str], backend: BackendInfo) -> None:
    """Check that every line is about some case of a full run.

    Raises:
        ConfigError: one is not.
    """
    ids = list(cases)
    for line in lines:
        if not any(line.matches(case) for case in ids):
            raise ConfigError(
                f"{line.where}: {line.pattern!r} matches none of the {len(ids)} cases of {backend.id}. Take the line "
                f"out, or correct it"
            )
