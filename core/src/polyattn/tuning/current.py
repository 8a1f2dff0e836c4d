"""The store of this process, and what of it is in memory: what kernels ask on their way to a launch.

The file is read once for each device and kernel. Nothing here measures.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..envvars import text
from ..epoch import bump
from ..errors import ConfigError, PolyattnError, did_you_mean
from .kernels import Choices, Kernel, Key
from .places import place_of
from .rows import Quarantined, Row, canonical
from .store import TuningStore, path_of

if TYPE_CHECKING:
    from torch import device

__all__ = [
    "MODES",
    "cached",
    "default_path",
    "kernel_config",
    "mode",
    "quarantine",
    "record",
    "release",
    "reload",
    "store",
    "watch",
]

MODES = ("use", "off", "online")
_T = TypeVar("_T")
_MOST = 65536
_Asked = tuple[str, Key, "device"]


class _State:
    store: TuningStore | None = None
    off = False
    known: dict[_Asked, Choices | None]
    tables: dict[tuple[str, device], dict[str, Row]]
    read: dict[Hashable, Any]
    watched: dict[Hashable, tuple[Callable[[], Any], Any]]

    def __init__(self) -> None:
        self.known, self.tables, self.read, self.watched = {}, {}, {}, {}


_state = _State()


def mode() -> str:
    """Read the mode from POLYATTN_TUNING. `use`: what was measured is used. `off`: nothing is read. `online`: what was
    not measured is, at the first large call of its kind, see `polyattn.bench.tuner.online`.

    Raises:
        ConfigError: the variable has another value.
    """
    value = (text("POLYATTN_TUNING") or "use").strip().lower()
    if value not in MODES:
        raise ConfigError(
            f"POLYATTN_TUNING={value!r} is not known.{did_you_mean(value, MODES)} Allowed: {', '.join(MODES)}"
        )
    return value


def default_path() -> Path:
    """POLYATTN_TUNING_STORE, else `polyattn/tuning.sqlite3` in the user's folder for caches.

    Raises:
        ConfigError: the user has no home folder, as in a container that runs as anybody.
    """
    if named := text("POLYATTN_TUNING_STORE"):
        return path_of(named)
    folder = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    return (Path(folder) if folder else path_of("~/.cache")) / "polyattn" / "tuning.sqlite3"


def store() -> TuningStore:
    """The store of this process.

    Raises:
        ConfigError: its file is damaged, of another program or of a later polyattn, or nobody can tell where it is.
    """
    found = _state.store
    if found is None:
        found = _state.store = TuningStore(default_path())
    return found


def reload() -> None:
    """Read the environment and the file anew: what other processes measured since, another store."""
    _state.store = None
    _forget()


def record(*rows: Row) -> None:
    """Keep measurements in the store of this process, and use them from here on."""
    store().record(*rows)
    _forget()


def quarantine(*held: Quarantined) -> None:
    """Keep backends out of automatic choice, from here on."""
    store().quarantine(*held)
    _forget()


def release(backend: str | None = None) -> int:
    """Let a backend, or all, be chosen again, and be measured. Returns how many entries there were."""
    count = store().release(backend)
    _forget()
    return count


def cached(name: Hashable, make: Callable[[], _T]) -> _T:
    """Return what was read once, until something is recorded or `reload` is called."""
    read = _state.read
    if name not in read:
        # Into what was looked at: who records meanwhile begins another, and this is stale by then.
        read[name] = make()
    found: _T = read[name]
    return found


def watch(name: Hashable, ask: Callable[[], Any]) -> None:
    """Register what compiled code depends on. Once `ask()` returns something new, the code is traced again. Call this
    before compiling, so that no change is missed."""
    # What was said first counts: other code may stand on that.
    _state.watched.setdefault(name, (ask, ask()))


def _forget() -> None:
    _state.tables, _state.read = {}, {}
    _state.known = {}  # the last: who asks meanwhile must not keep here what was in those
    bump(traced=_overtaken())


def _overtaken() -> bool:
    """Return whether compiled code stands on something that is no longer said."""
    watched = list(_state.watched.values())
    try:
        changed = any(ask() != said for ask, said in watched)
    except PolyattnError:
        changed = True  # who is traced anew gets the error
    if changed:
        _state.watched = {}
    return changed


def kernel_config(kernel: Kernel, key: Key, default: Choices, where: device) -> Choices:
    """The choices to launch a kernel with: what was measured for this key on this device, else `default`.

    A lookup in memory, after the first call for a device. A store that cannot be read is warned about once, and the
    defaults serve.

    Args:
        kernel: a registered one. key: values of `kernel.key`, lengths as `bucket`s. where: the device, with an index.
    """
    asked = (kernel.name, key, where)
    try:
        found = _state.known[asked]
    except KeyError:
        found = _find(kernel, key, where)
    return default if found is None else found


def _find(kernel: Kernel, key: Key, where: device) -> Choices | None:
    named = canonical(kernel.named(key))
    known, tables = _state.known, _state.tables  # as in `cached`
    table = tables.get((kernel.name, where))
    if table is None:
        table = tables[kernel.name, where] = _read(kernel, where)
    row = table.get(named)
    if len(known) >= _MOST:
        known.clear()
    found = known[kernel.name, key, where] = None if row is None else row.value
    return found


def _read(kernel: Kernel, where: device) -> dict[str, Row]:
    if mode() == "off":
        return {}
    try:
        rows = store().rows(place_of(where, kernel.versions, kernel.revision), kernel.subject)
        for row in rows:
            kernel.check(row.value)
    except ConfigError as exc:
        warnings.warn(f"nothing measured is used for {kernel.name}: {exc}", RuntimeWarning, stacklevel=5)
        return {}
    return {canonical(row.key): row for row in rows}
