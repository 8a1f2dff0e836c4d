"""This module has what was measured on a device: the tables of plugins, and of the store what was asked for."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..contract import AttentionRequest
from ..errors import ConfigError
from ..registry.foreign import Run
from ..registry.manager import get_manager
from .current import cached, mode, store
from .kernels import bucket
from .predicted import Model, Rates, rates_of
from .rows import BACKEND, Place, Row, canonical, row_of, when
from .similarity import Numbers, distance, numbers_of, scaled
from .store import FORMAT, Asked
from .times import FAR, Lengths, Measured, SimilarRequest

__all__ = [
    "NOT_ANY",
    "Known",
    "known",
    "measured_of",
    "shipped",
    "shipped_devices",
    "shipped_rates",
    "shipped_rows",
    "shipped_samples",
]


_MOST = 256
_ByLengths = Mapping[Lengths, Measured]


@dataclasses.dataclass(frozen=True)
class Tables:
    """The measurements that plugins ship of a device, by the text of their `request_key` and by their lengths. `kinds`:
    requests, with their text, by what tells their kernels apart."""

    measured: Mapping[str, _ByLengths] = dataclasses.field(default_factory=dict)
    kinds: Mapping[str, Sequence[tuple[str, Numbers]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, _ByLengths]) -> Tables:
        """Build this from measurements."""
        kinds: dict[str, list[tuple[str, Numbers]]] = {}
        for key in found:
            if (said := numbers_of(json.loads(key))) is not None:
                kinds.setdefault(said[0], []).append((key, said[1]))
        return cls(found, kinds)

    def alike(self, text: str) -> dict[str, _ByLengths]:
        """The measurements of other requests of the same kind."""
        said = numbers_of(json.loads(text)) if self.kinds else None
        others = self.kinds.get(said[0], ()) if said is not None else ()
        return {other: self.measured[other] for other, _ in others if other != text}


@dataclasses.dataclass(frozen=True)
class Known:
    """Describes what is known of a device: what plugins ship, and what its store has, which is asked for each request
    once and not read whole.

    Attributes:
        tables: what plugins ship. place: of the measurements of the store; None: it is not asked.
        quarantined: backend -> reason, by the text of `request_key`.
        model: predicts what was not measured; None = nothing is known of such devices.
    """

    tables: Tables = dataclasses.field(default_factory=Tables)
    place: Place | None = None
    quarantined: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    model: Model | None = None
    _asked: dict[str, Asked] = dataclasses.field(default_factory=dict)
    _own: dict[str, Sequence[Measured]] = dataclasses.field(default_factory=dict)
    _kin: dict[tuple[str, bool], Sequence[Measured]] = dataclasses.field(default_factory=dict)

    def own(self, key: Mapping[str, Any]) -> Sequence[Measured]:
        """Measurements of a `request_key` itself, those of this machine before shipped ones of the same lengths."""
        text = canonical(key)
        if text not in self._own:
            _make_room(self._own)
            found = {**self.tables.measured.get(text, {})}
            for row in self._of_store(text).own:
                _keep(found, row)
            self._own[text] = tuple(found.values())
        return self._own[text]

    def elsewhere(self, key: Mapping[str, Any]) -> Sequence[str]:
        """Why other measurements of such requests are not used, for each."""
        here, others = self.place, self._of_store(canonical(key)).elsewhere
        if here is None:
            return ()
        return [
            f"of {here.differs(place)}, which this machine has not" for place, count in others for _ in range(count)
        ]

    def advising(self, key: Mapping[str, Any], *, own: bool = True) -> Sequence[Measured]:
        """Measurements that have a say in requests of a `request_key`: their own, then of requests like them, the
        nearest first, by the lengths at which these have as much to do. own: False leaves out the former.

        What is measured while a program runs says nothing of its other requests: their choices would change under way.
        """
        text, online = canonical(key), mode() == "online"
        if (text, online) not in self._kin:
            _make_room(self._kin)
            self._kin[text, online] = self._find_kin(key, text, online=online)
        return (*(self.own(key) if own else ()), *self._kin[text, online])

    def _of_store(self, text: str) -> Asked:
        if self.place is None:
            return NOTHING_ASKED
        if text not in self._asked:
            _make_room(self._asked)
            self._asked[text] = _ask(self.place, text)
        return self._asked[text]

    def _find_kin(self, key: Mapping[str, Any], text: str, *, online: bool) -> Sequence[Measured]:
        asked = numbers_of(key)
        if asked is None:
            return ()
        alike = {other: {**by_lengths} for other, by_lengths in self.tables.alike(text).items()}
        for row in () if online else self._of_store(text).alike:
            _keep(alike.setdefault(canonical(row.key["request"]), {}), row)
        found = []
        for other, by_lengths in alike.items():
            theirs = numbers_of(json.loads(other))
            off = distance(theirs[1], asked[1]) if theirs is not None and theirs[0] == asked[0] else None
            if off is None or theirs is None:
                continue
            held = {} if online else self.quarantined.get(other, {})
            kin = [_for_kin(m, theirs[1], asked[1], off, held) for m in by_lengths.values()]
            found += [(off, one) for one in kin if one is not None]
        return tuple(one for _, one in sorted(found, key=lambda f: (f[0], f[1].shipped)))


def _make_room(kept: dict[Any, Any]) -> None:
    if len(kept) >= _MOST:
        kept.clear()


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
NOTHING_ASKED = Asked((), (), ())


def known(request: AttentionRequest, place: Callable[[], Place], tuning: str = "") -> Known:
    """Return what is known of the device of a request. `place` is asked only where there is anything.

    tuning: the `mode`, where the caller has asked for it.
    """
    if (tuning or mode()) == "off":
        return NOT_ANY
    return cached(("backends", request.platform, request.arch, get_manager().measurements), lambda: _read(place))


def _read(place: Callable[[], Place]) -> Known:
    try:
        measured, held = store().has(BACKEND), store().quarantined()
    except ConfigError as exc:
        warnings.warn(f"nothing measured decides about backends: {exc}", RuntimeWarning, stacklevel=6)
        measured, held = False, []
    if not (measured or held or shipped_rows() or shipped_samples()):
        return NOT_ANY
    here = place()
    quarantined: dict[str, dict[str, str]] = {}
    for one in held:
        if one.place == here:
            quarantined.setdefault(canonical(one.key), {})[one.backend] = one.reason
    ships = shipped(place)
    if not (measured or quarantined or ships.tables.measured or ships.model):
        return NOT_ANY
    return Known(ships.tables, here if measured else None, quarantined, ships.model)


def _ask(place: Place, text: str) -> Asked:
    try:
        return store().asked(place, json.loads(text))
    except ConfigError as exc:
        warnings.warn(f"nothing measured decides about backends: {exc}", RuntimeWarning, stacklevel=6)
        return NOTHING_ASKED


def shipped(place: Callable[[], Place]) -> Known:
    """Return what plugins ship about a device, without anything that was measured here."""
    if not (shipped_rows() or shipped_samples()):
        return NOT_ANY
    here = place()
    return cached(("shipped", here.device, here.arch, get_manager().measurements), lambda: _shipped(here))


def _shipped(here: Place) -> Known:
    """Return what the authors of plugins measured on such a device, and what it says of others of its architecture."""
    model = Model.of([*shipped_rows(), *shipped_samples()], shipped_rates(), here.device, here.arch)
    found: dict[str, dict[Lengths, Measured]] = {}
    for row in shipped_rows():
        if (row.place.device, row.place.arch) == (here.device, here.arch):
            _keep(found.setdefault(canonical(row.key["request"]), {}), row, shipped=True)
    return Known(Tables.of(found), model=model)


def _keep(found: dict[Lengths, Measured], row: Row, *, shipped: bool = False) -> None:
    one = measured_of(row, shipped=shipped)
    found[one.lengths] = one


def measured_of(row: Row, *, shipped: bool = False) -> Measured:
    """Return what a row about backends says."""
    lengths, said = (row.key["batch"], row.key["q"], row.key["k"]), row.value.get
    by, late = said("by", {}), (*said("late", ()),)
    return Measured(lengths, row.value["times"], row.date, shipped, said("host", {}), said("rule", ""), by, late=late)


def shipped_rows() -> Sequence[Row]:
    """The measurements of backends that come with plugins, the latest last, read once in a process. A file that cannot
    be used is said once, and the others are used."""
    return _read_tables(get_manager().measurements).rows


def shipped_samples() -> Sequence[Row]:
    """The measurements of a sample of requests that come with plugins: they teach the cost model, and answer none.

    One row in the neighbourhood of a request decides worse than the model made of all: it knows neither the libraries
    that were missing there, nor that its neighbours say otherwise. Their lengths are not rounded.
    """
    return _read_tables(get_manager().measurements).samples


def shipped_rates() -> Mapping[str, Rates]:
    """The rates of devices by name, as plugins have them beside their measurements."""
    return _read_tables(get_manager().measurements).rates


def shipped_devices(arch: str) -> list[str]:
    """Names of the devices of an architecture that plugins ship measurements of."""
    return sorted({row.place.device for row in shipped_rows() if row.place.arch == arch})


class _Read(NamedTuple):
    """What plugins ship: measurements, those of samples, and the rates of devices by name."""

    rows: Sequence[Row]
    samples: Sequence[Row]
    rates: Mapping[str, Rates]


@functools.lru_cache(maxsize=4)
def _read_tables(announced: tuple[tuple[str, str], ...]) -> _Read:
    found: list[Row] = []
    samples: list[Row] = []
    rates: dict[str, Rates] = {}
    for name, file in announced:
        with Run() as run:
            try:
                one = _read_table(file)
                found, samples, rates = [*found, *one.rows], [*samples, *one.samples], {**rates, **one.rates}
            except BaseException as exc:  # the import of a stranger's package may raise anything
                if run.ended_by_host(exc):
                    raise
                label, why = get_manager().plugins[name].label, f"{type(exc).__name__}: {exc}"
                warnings.warn(f"the measurements of plugin {label} are not used: {why}", RuntimeWarning, stacklevel=2)
    return _Read(tuple(sorted(found, key=lambda row: when(row.date))), tuple(samples), rates)


def _read_table(file: str) -> _Read:
    package, _, path = file.partition(":")
    data = json.loads(importlib.resources.files(package).joinpath(path).read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("measurements"), list):
        raise ConfigError(f"{file} is no export of `polyattn tune`, which has format {FORMAT!r}")
    rows = [row_of(one, f"{file}: measurement {i}") for i, one in enumerate(data["measurements"])]
    kept = [row for row in rows if row.subject == BACKEND]
    sample = data.get("sample", False)
    if not isinstance(sample, bool):
        raise ConfigError(
            f"{file}: sample is {sample!r}; true it is where its requests are a sample of all, else false"
        )
    return _Read(() if sample else kept, kept if sample else (), rates_of(data.get("rates", {}), file))
