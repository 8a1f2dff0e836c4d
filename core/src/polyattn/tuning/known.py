"""This module reads all measurements of a device once, from the store and from plugins, and keeps them in memory."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..contract import AttentionRequest
from ..errors import ConfigError
from ..registry.foreign import Run
from ..registry.manager import get_manager
from .current import cached, mode, store
from .kernels import bucket
from .rows import BACKEND, Place, Row, canonical, row_of, when
from .similarity import Numbers, distance, numbers_of, scaled
from .store import FORMAT
from .times import FAR, Lengths, Measured, SimilarRequest

__all__ = [
    "NOT_ANY",
    "Known",
    "known",
    "measured_of",
    "shipped",
    "shipped_devices",
    "shipped_rows",
]


_MOST = 256


@dataclasses.dataclass(frozen=True)
class Known:
    """Describes what is known of a device.

    Attributes:
        measured: measurements by the text of `request_key`. elsewhere: why others of such requests are not used.
        quarantined: backend -> reason. kinds: requests, with their text, by what tells their kernels apart.
        shipped: of this, what plugins ship; None: this is that.
    """

    measured: Mapping[str, Sequence[Measured]] = dataclasses.field(default_factory=dict)
    elsewhere: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    quarantined: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    kinds: Mapping[str, Sequence[tuple[str, Numbers]]] = dataclasses.field(default_factory=dict)
    shipped: Known | None = None
    _kin: dict[str, Sequence[Measured]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Mapping[Lengths, Measured]], **more: Any) -> Known:
        """Build this from measurements, by the text of their request and by their lengths."""
        kinds: dict[str, list[tuple[str, Numbers]]] = {}
        for key in found:
            if (said := numbers_of(json.loads(key))) is not None:
                kinds.setdefault(said[0], []).append((key, said[1]))
        return cls({key: tuple(by_lengths.values()) for key, by_lengths in found.items()}, kinds=kinds, **more)

    def advising(self, key: Mapping[str, Any], *, own: bool = True) -> Sequence[Measured]:
        """Measurements that have a say in requests of a `request_key`: their own, then of requests like them, the
        nearest first, by the lengths at which these have as much to do. own: False leaves out the former.

        What is measured while a program runs says nothing of its other requests: their choices would change under way.
        """
        text, alike = canonical(key), self
        if mode() == "online" and self.shipped is not None:
            alike = self.shipped
        return (*(self.measured.get(text, ()) if own else ()), *alike._found_kin(key, text))

    def _found_kin(self, key: Mapping[str, Any], text: str) -> Sequence[Measured]:
        if not self.kinds:
            return ()
        found = self._kin.get(text)
        if found is None:
            if len(self._kin) >= _MOST:
                self._kin.clear()
            found = self._kin[text] = self._find_kin(key, text)
        return found

    def _find_kin(self, key: Mapping[str, Any], text: str) -> Sequence[Measured]:
        asked = numbers_of(key)
        if asked is None:
            return ()
        kind, mine = asked
        near = [
            (off, other, theirs)
            for other, theirs in self.kinds.get(kind, ())
            if other != text and (off := distance(theirs, mine)) is not None
        ]
        found = [
            (off, kin)
            for off, other, theirs in near
            for one in self.measured[other]
            if (kin := _for_kin(one, theirs, mine, off, self.quarantined.get(other, {}))) is not None
        ]
        return tuple(one for _, one in sorted(found, key=lambda f: (f[0], f[1].shipped)))


def _for_kin(one: Measured, theirs: Numbers, mine: Numbers, off: float, held: Collection[str]) -> Measured | None:
    """A measurement for another request, None where that has more to do at any batch, or nobody is left: who is
    quarantined where it was measured is not taken from there."""
    times = one.without(held)
    batch, (_, s_q, s_k) = scaled(one.lengths[0], theirs, mine), one.lengths
    if not times or batch * FAR < 1:
        return None
    fields = {name: value for name, value in theirs.fields.items() if value != mine.fields[name]}
    whole = (bucket(max(round(batch), 1)), s_q, s_k)
    return dataclasses.replace(one, lengths=whole, times=times, kin=SimilarRequest(fields, off, one.lengths, batch))


NOT_ANY = Known()


def known(request: AttentionRequest, place: Callable[[], Place], tuning: str = "") -> Known:
    """Return all measurements of the device of a request. `place` is asked only where there is anything.

    tuning: the `mode`, where the caller has asked for it.
    """
    if (tuning or mode()) == "off":
        return NOT_ANY
    return cached(("backends", request.platform, request.arch, get_manager().measurements), lambda: _read(place))


def _read(place: Callable[[], Place]) -> Known:
    try:
        rows, held = store().rows(subject=BACKEND), store().quarantined()
    except ConfigError as exc:
        warnings.warn(f"nothing measured decides about backends: {exc}", RuntimeWarning, stacklevel=6)
        rows, held = [], []
    if not (rows or held or shipped_rows()):
        return NOT_ANY
    here, tables = place(), shipped(place)
    found = {key: {one.lengths: one for one in of_key} for key, of_key in tables.measured.items()}
    elsewhere: dict[str, list[str]] = {}
    for row in rows:
        if row.place == here:
            _keep(found, row, shipped=False)
        else:
            elsewhere.setdefault(_key(row), []).append(f"of {here.differs(row.place)}, which this machine has not")
    quarantined: dict[str, dict[str, str]] = {}
    for one in held:
        if one.place == here:
            quarantined.setdefault(canonical(one.key), {})[one.backend] = one.reason
    if not (found or elsewhere or quarantined):
        return NOT_ANY
    return Known.of(found, elsewhere=elsewhere, quarantined=quarantined, shipped=tables)


def shipped(place: Callable[[], Place]) -> Known:
    """Return what plugins ship about a device, without anything that was measured here."""
    if not shipped_rows():
        return NOT_ANY
    here = place()
    return cached(("shipped", here.device, here.arch, get_manager().measurements), lambda: Known.of(_tables(here)))


def _tables(here: Place) -> dict[str, dict[Lengths, Measured]]:
    """Return what the authors of plugins measured on such a device."""
    found: dict[str, dict[Lengths, Measured]] = {}
    for row in shipped_rows():
        if (row.place.device, row.place.arch) == (here.device, here.arch):
            _keep(found, row, shipped=True)
    return found


def _keep(found: dict[str, dict[Lengths, Measured]], row: Row, *, shipped: bool) -> None:
    one = measured_of(row, shipped=shipped)
    found.setdefault(_key(row), {})[one.lengths] = one


def measured_of(row: Row, *, shipped: bool = False) -> Measured:
    """Return what a row about backends says."""
    lengths, said = (row.key["batch"], row.key["q"], row.key["k"]), row.value.get
    by, late = said("by", {}), (*said("late", ()),)
    return Measured(lengths, row.value["times"], row.date, shipped, said("host", {}), said("rule", ""), by, late=late)


def _key(row: Row) -> str:
    return canonical(row.key["request"])


def shipped_rows() -> Sequence[Row]:
    """The measurements of backends that come with plugins, the latest last, read once in a process. A file that cannot
    be used is said once, and the others are used."""
    return _read_tables(get_manager().measurements)


def shipped_devices(arch: str) -> list[str]:
    """Names of the devices of an architecture that plugins ship measurements of."""
    return sorted({row.place.device for row in shipped_rows() if row.place.arch == arch})


@functools.lru_cache(maxsize=4)
def _read_tables(announced: tuple[tuple[str, str], ...]) -> Sequence[Row]:
    found: list[Row] = []
    for name, file in announced:
        with Run() as run:
            try:
                found += _read_table(file)
            except BaseException as exc:  # the import of a stranger's package may raise anything
                if run.ended_by_host(exc):
                    raise
                label, why = get_manager().plugins[name].label, f"{type(exc).__name__}: {exc}"
                warnings.warn(f"the measurements of plugin {label} are not used: {why}", RuntimeWarning, stacklevel=2)
    return tuple(sorted(found, key=lambda row: when(row.date)))


def _read_table(file: str) -> list[Row]:
    package, _, path = file.partition(":")
    data = json.loads(importlib.resources.files(package).joinpath(path).read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("measurements"), list):
        raise ConfigError(f"{file} is no export of `polyattn tune`, which has format {FORMAT!r}")
    rows = [row_of(one, f"{file}: measurement {i}") for i, one in enumerate(data["measurements"])]
    return [row for row in rows if row.subject == BACKEND]
