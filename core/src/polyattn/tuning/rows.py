"""A measurement as it is kept: where it holds, what it is about, what was best, and who says so."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

from ..contract.names import parts
from ..errors import ConfigError, did_you_mean
from .kernels import registered_kernels

__all__ = ["BACKEND", "KERNEL", "Place", "Quarantined", "Row", "canonical", "check_row", "row_of", "when"]

BACKEND, KERNEL = "backend", "kernel:"
"""Subjects: which backend serves a request; which choices of a kernel, its name following."""

_LENGTHS = ("batch", "q", "k")
_LONGEST = 2**62
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?([+-]\d\d:\d\d)?)?")
"""The dates of ISO 8601 that SQLite reads as well as Python."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Describes where a measurement is valid. Another device, or another version, and it is not looked at.

    Attributes:
        device: its name, such as "NVIDIA H200". arch: sm90, gfx942, ...; "" where there is none.
        versions: (name, version) of what was measured, sorted by name.
    """

    device: str
    arch: str
    versions: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions)
        return f"{self.device}{f' ({self.arch})' if self.arch else ''}{f', {versions}' if versions else ''}"

    def differs(self, other: Place) -> str:
        """Say how another place differs: its device, or its versions that are not these. "" = it does not."""
        if (other.device, other.arch) != (self.device, self.arch):
            return f"{other.device}{f' ({other.arch})' if other.arch else ''}"
        mine, theirs = dict(self.versions), dict(other.versions)
        names = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
        return ", ".join(f"{name} {theirs.get(name) or 'absent'}" for name in names)


@dataclasses.dataclass(frozen=True)
class Row:
    """Holds one measurement.

    Attributes:
        place: see there. subject: `kernel:NAME`, or `backend`.
        key: what was asked, by name; lengths as buckets. value: what was best of it.
        microseconds: its time. date: ISO 8601, UTC. source: who measured, for people.
    """

    place: Place
    subject: str
    key: Mapping[str, Any]
    value: Mapping[str, Any]
    microseconds: float
    date: str
    source: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the row as data for JSON."""
        return {
            "device": self.place.device,
            "arch": self.place.arch,
            "versions": dict(self.place.versions),
            "subject": self.subject,
            "key": dict(self.key),
            "value": dict(self.value),
            "microseconds": self.microseconds,
            "date": self.date,
            "source": self.source,
        }


@dataclasses.dataclass(frozen=True)
class Quarantined:
    """A backend that must not be chosen automatically for some requests in a place.

    Attributes:
        key: `request_key` of the requests, of all lengths. reason: what it did, for people. date: ISO 8601, UTC.
    """

    place: Place
    backend: str
    key: Mapping[str, Any]
    reason: str
    date: str


_TYPES: Mapping[str, tuple[type, ...]] = {
    "device": (str,),
    "arch": (str,),
    "versions": (dict,),
    "subject": (str,),
    "key": (dict,),
    "value": (dict,),
    "microseconds": (int, float),
    "date": (str,),
    "source": (str,),
}


def canonical(data: Mapping[str, Any]) -> str:
    """The one text of a mapping: equal mappings have equal texts."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def row_of(data: Any, where: str) -> Row:
    """The row that `Row.plain` made.

    Raises:
        ConfigError: it is none; `where` begins the message.
    """
    if not isinstance(data, dict) or set(data) != set(_TYPES):
        raise ConfigError(f"{where}: a measurement has exactly {', '.join(_TYPES)}; got {_shown(data)}")
    for name, types in _TYPES.items():
        if not isinstance(data[name], types) or isinstance(data[name], bool):
            raise ConfigError(
                f"{where}: {name} is {_shown(data[name])}; {' or '.join(t.__name__ for t in types)} it is"
            )
    place = Place(data["device"], data["arch"], tuple(sorted((str(k), str(v)) for k, v in data["versions"].items())))
    rest = {name: data[name] for name in ("subject", "key", "value", "microseconds", "date", "source")}
    row = Row(place, **rest)
    _check_whole(row, where)
    return row


def check_row(row: Row, where: str, backends: Collection[str] | None) -> None:
    """Refuse a measurement that is not valid, that names something unknown here, or a choice that its kernel does not
    have.

    Args:
        backends: names that a backend row may have; None: any.

    Raises:
        ConfigError: `where` begins the message.
    """
    _check_whole(row, where)
    if row.subject == BACKEND:
        rule = row.value.get("rule")
        for name in (*row.value["times"], *row.value.get("host", {}), *([rule] if rule else [])):
            if backends is not None and parts(name)[0] not in backends:
                known = sorted(backends)
                raise ConfigError(
                    f"{where}: no backend {name!r} is registered here.{did_you_mean(name, known)} Known: "
                    f"{', '.join(known)}"
                )
        return
    name, kernels = row.subject[len(KERNEL) :], registered_kernels()
    if name not in kernels:
        raise ConfigError(
            f"{where}: no kernel {name!r} is registered here.{did_you_mean(name, kernels)} Known: "
            f"{', '.join(sorted(kernels)) or 'none'}; install the package that has it"
        )
    kernel = kernels[name]
    if set(row.key) != set(kernel.key):
        raise ConfigError(f"{where}: kernel {name!r} has keys of {', '.join(kernel.key)}; got {', '.join(row.key)}")
    try:
        kernel.check(row.value)
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def _check_whole(row: Row, where: str) -> None:
    """Return what a row by itself tells, whoever is registered: what is read from a file must not fail in a call."""
    _check_time("microseconds", row.microseconds, where)
    for name, text in (("device", row.place.device), ("arch", row.place.arch), ("source", row.source)):
        if text.encode("utf-8", "ignore").decode() != text:
            raise ConfigError(f"{where}: {name} is {_shown(text)}; characters that UTF-8 can write it has")
    if not _is_date(row.date):
        raise ConfigError(f"{where}: date is {row.date!r}; ISO 8601 it is, such as 2026-11-22T13:25:08+00:00")
    if row.subject == BACKEND:
        _check_key(row.key, where)
        _check_figures(row.value, where)
    elif not row.subject.startswith(KERNEL):
        raise ConfigError(f"{where}: subject={row.subject!r}; allowed: {BACKEND}, {KERNEL}NAME")


def when(date: str) -> datetime.datetime:
    """The time of a row's date; without a zone it is UTC.

    Raises:
        ValueError: it is no date.
    """
    then = datetime.datetime.fromisoformat(date)
    return then if then.tzinfo else then.replace(tzinfo=datetime.timezone.utc)


def _is_date(text: str) -> bool:
    try:
        when(text)
    except ValueError:
        return False
    return _DATE.fullmatch(text) is not None


def _check_key(key: Mapping[str, Any], where: str) -> None:
    """Return what was asked, and at which lengths."""
    if set(key) != {"request", *_LENGTHS}:
        raise ConfigError(
            f"{where}: a key of a request has exactly request, batch, q, k; got {', '.join(map(str, key))}"
        )
    if not isinstance(key["request"], dict):
        raise ConfigError(f"{where}: request is {_shown(key['request'])}; an object of its fields it is")
    for name in _LENGTHS:
        if type(key[name]) is not int or not 1 <= key[name] <= _LONGEST:
            raise ConfigError(f"{where}: {name} is {_shown(key[name])}; a whole number from 1 to 2^62 it is")


def _check_figures(value: Mapping[str, Any], where: str) -> None:
    """The fastest backend, those it was measured beside, and who is chosen without measurements."""
    for what in ("times", "host"):
        times = value.get(what, {})
        if not isinstance(times, dict):
            raise ConfigError(f"{where}: {what} is {_shown(times)}; microseconds by backend it is")
        for name, time in times.items():
            _check_time(f"the time of {name}", time, where)
    times, best, rule = value.get("times", {}), value.get("backend"), value.get("rule", "")
    if not isinstance(best, str) or best not in times:
        raise ConfigError(
            f"{where}: backend is {_shown(best)}; one of those with a time it is: {', '.join(times) or 'none'}"
        )
    if not isinstance(rule, str):
        raise ConfigError(f"{where}: rule is {_shown(rule)}; the name of a backend it is")
    by = value.get("by", {})
    if not isinstance(by, dict) or not all(name in times and isinstance(kind, str) for name, kind in by.items()):
        raise ConfigError(f"{where}: by is {_shown(by)}; whose kernels were measured, by backends with a time, it is")
    late = value.get("late", [])
    if not isinstance(late, list) or not all(isinstance(name, str) for name in late):
        raise ConfigError(f"{where}: late is {_shown(late)}; a list of the backends that there was no time for it is")


def _check_time(what: str, time: Any, where: str) -> None:
    """A whole number may be larger than any float, or than what a store's column takes."""
    most = 2**63 - 1 if isinstance(time, int) else sys.float_info.max
    if not isinstance(time, (int, float)) or isinstance(time, bool) or not 0 < time <= most:
        raise ConfigError(f"{where}: {what} is {_shown(time)}; a time is finite and above 0")


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) < 80 else f"{text[:77]}..."
