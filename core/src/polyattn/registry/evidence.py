"""Evidence files: what a conformance run showed for a backend on a device, kept beside the plugin that owns it.

`evidence/<name>@<platform>.json` next to the plugin's module holds level, device, versions, date, counts, and hashes of
the sources that ran and of the capability rows that were tried. When either changes the evidence reads *stale* until it
is run again, or, where the sources do what they did, until `polyattn conform --refresh`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from ..contract import EvidenceLevel, Provider, Row
from ..contract.checks import check_types
from ..errors import PluginError
from ..user_files import MEGABYTE, read_text

__all__ = [
    "EARLIER_KEYS",
    "KEYS",
    "LEVELS",
    "Evidence",
    "evidence_file",
    "read_evidence",
    "row_hash",
    "source_hash",
    "write_evidence",
]

LEVELS: tuple[str, ...] = get_args(EvidenceLevel)
"""Strongest first."""

KEYS: Mapping[str, int] = {"hardware": 1100, "interpreter": 257}
"""How many keys the longest calls of conformance have, by what a run is evidence of."""

ENOUGH: Mapping[str, int] = {"linear": 65}
"""The same of families whose calls are shorter: linear attention goes by chunks of 64 tokens, and hands a state on."""

EARLIER_KEYS = 100
"""How many they had before runs kept it."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Describes what was run.

    Attributes:
        sources: files relative to the plugin's folder. digest: their hash when it ran. code: hash of what they do,
            which comments, names and moves do not change; "" = not known.
        absent: providers of the backend that were not there or have other families, of which it shows nothing.
        rows: hash of what the others declared for `arch` ("" = anywhere); "" = not known.
        families: those that were tried, of other ones it shows nothing; () = not known.
        reached: family -> queries, keys and grid (sequences x heads), the most of a call that passed.
        partial: the backend has families that no run tried. others: earlier runs, of other providers or families.
    """

    backend: str
    platform: str
    level: str
    device: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    date: str = ""
    command: str = ""
    passed: int = 0
    refused: int = 0
    xfailed: int = 0
    note: str = ""
    sources: tuple[str, ...] = ()
    digest: str = ""
    code: str = ""
    absent: tuple[str, ...] = ()
    arch: str = ""
    rows: str = ""
    families: tuple[str, ...] = ()
    reached: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    stale: bool = False
    partial: bool = False
    others: tuple[Evidence, ...] = ()

    @property
    def unseen(self) -> tuple[str, ...]:
        """Providers of which no run shows anything, one that is stale apart."""
        seen_elsewhere = [{*one.absent} for one in self.others if not one.stale]
        return tuple(name for name in self.absent if all(name in absent for absent in seen_elsewhere))

    @property
    def keys(self) -> int:
        """Up to how many keys it holds: the longest of the family whose longest are fewest."""
        return min((most["keys"] for most in self.reached.values()), default=EARLIER_KEYS)

    @property
    def outdated(self) -> bool:
        """Return whether a run is stale, or tried no more keys than a kernel reads at once: it says less than it did.

        Other runs count where they have other families.
        """
        elsewhere = [one for one in self.others if not {*one.families} & {*self.families}]
        return any(one.stale or one.short for one in (self, *elsewhere))

    @property
    def short(self) -> bool:
        """Return whether the longest calls of a family had no more keys than a kernel reads at once."""
        least = KEYS.get(self.level, 0)
        if not self.reached:
            return least > EARLIER_KEYS
        return any(most["keys"] < min(ENOUGH.get(family, least), least) for family, most in self.reached.items())

    def left_by(self, other: Evidence) -> Evidence | None:
        """What this run shows beside a later one: of the providers that the later one did not try, or, as long as both
        say what families they tried, of the other families. None = nothing."""
        if not self.stale and {*self.absent} != {*other.absent}:
            return self
        rest = tuple(name for name in self.families if name not in other.families) if other.families else ()
        reached = {name: most for name, most in self.reached.items() if name in rest}
        return dataclasses.replace(self, families=rest, reached=reached) if rest else None

    def beside(self, providers: Iterable[Provider]) -> Evidence:
        """The same, and stale where `providers`, those of the backend now, declare something else than was tried."""
        others = tuple(one.beside(providers) for one in self.others)
        rows = [row for provider in providers if not provider.planned for row in provider.rows]
        spoken = {family for row in rows for family in getattr(row.when.get("family"), "values", ())}
        partial = bool(self.families) and not spoken <= {family for one in (self, *others) for family in one.families}
        if not self.rows or self.stale:
            return dataclasses.replace(self, partial=partial, others=others)
        tried = [provider for provider in providers if provider.name not in self.absent and not provider.planned]
        return dataclasses.replace(self, stale=self.rows != row_hash(tried, self.arch), partial=partial, others=others)

    def to_json(self) -> str:
        """The text of an evidence file."""
        return json.dumps(_plain(self), indent=1, sort_keys=True) + "\n"

    def __str__(self) -> str:
        if self.level == "declared":
            return "declared"
        xfailed = f"{self.xfailed} xfailed" if self.xfailed else ""
        partly = "in part" if self.unseen or self.partial else ""
        reach = f"up to {self.keys:,} keys" if self.level in KEYS else ""
        where = ", ".join(part for part in (self.device, self.date, xfailed, partly, reach) if part)
        return f"{self.level}{' (' + where + ')' if where else ''}{', stale' if self.outdated else ''}"


def source_hash(folder: Path, sources: Iterable[str]) -> str:
    """sha256 over names and contents of `sources`; a missing file counts as empty."""
    digest = hashlib.sha256()
    for name in sorted(sources):
        path = folder / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b"") + b"\0")
    return digest.hexdigest()[:16]


_FIELDS = [field for field in dataclasses.fields(Evidence) if field.name not in ("stale", "partial", "others")]


def _plain(evidence: Evidence) -> dict[str, Any]:
    data = {field.name: getattr(evidence, field.name) for field in _FIELDS}
    return {**data, "others": [_plain(one) for one in evidence.others]} if evidence.others else data


def _of(data: Mapping[str, Any], folder: Path) -> Evidence:
    """A run as its file has it; a later polyattn may have written more."""
    known: dict[str, Any] = {field.name: data[field.name] for field in _FIELDS if field.name in data}
    known |= {name: tuple(data.get(name, ())) for name in ("sources", "absent")}
    known["families"] = tuple(data.get("families", data.get("reached", ())))
    stale = known.get("digest") != source_hash(folder, known["sources"])
    return Evidence(**known, stale=stale, others=tuple(_of(one, folder) for one in data.get("others", ())))


def row_hash(providers: Iterable[Provider], arch: str = "") -> str:
    """sha256 over what `providers` declare for `arch` ("" = anywhere) and the accuracy they are held to.

    What cannot apply there, notes, and the order of rows and providers do not count.
    """
    said = [
        f"{provider.name} {provider.accuracy} {_declared(row)}"
        for provider in providers
        for row in provider.rows
        if not (arch and "arch" in row.when and row.when["arch"].reason(arch))
    ]
    return hashlib.sha256("\n".join(sorted(said)).encode()).hexdigest()[:16]


def _declared(row: Row) -> str:
    parts = [
        f"{kind} {name} {type(limit).__name__} {limit.describe()}"
        for kind, limits in (("when", row.when), ("allows", row.allows))
        for name, limit in limits.items()
        if (kind, name) != ("when", "arch")
    ]
    return "; ".join(sorted([*parts, *(f"lowered {name} {by}" for name, by in row.lowered.items())]))


def evidence_file(origin: str, backend: str, platform: str) -> Path:
    """Return where the evidence of a backend is, whose plugin was loaded from file `origin`."""
    return Path(origin).parent / "evidence" / f"{backend}@{platform}.json"


@functools.lru_cache(maxsize=4096)
def read_evidence(origin: str, backend: str, platform: str) -> Evidence:
    """The evidence of a backend whose plugin was loaded from file `origin`; level `declared` when there is none.

    Raises:
        PluginError: the file is there but is not an evidence file.
    """
    if not origin:
        return Evidence(backend, platform, "declared")
    folder = Path(origin).parent
    path = evidence_file(origin, backend, platform)
    if not path.is_file():
        return Evidence(backend, platform, "declared")
    try:
        evidence = _of(json.loads(read_text(path, 16 * MEGABYTE)), folder)
        check_types(evidence, path.name)
    except (AttributeError, OSError, PluginError, RecursionError, TypeError, ValueError) as exc:
        raise PluginError(
            f"{path.name} is not an evidence file: {exc}; run `polyattn conform {backend}` again"
        ) from exc
    for one in (evidence, *evidence.others):
        if one.level not in LEVELS:
            raise PluginError(f"{path.name}: level {one.level!r} is not one of {', '.join(LEVELS)}")
    return evidence


def write_evidence(origin: str, evidence: Evidence, *more: Evidence) -> Path:
    """Write `evidence` beside the plugin, with the hash of its sources as they are now; `more` are runs of other chips
    beside it.

    Of earlier runs of its level stays what they show beside it (`Evidence.left_by`): of those that take one call, a run
    shows the first it has. The run of the most families is the first in the file.
    """
    folder = Path(origin).parent
    try:
        before = read_evidence(origin, evidence.backend, evidence.platform)
        runs = [dataclasses.replace(before, others=()), *before.others]
    except PluginError:
        runs = []
    kept = [left for one in runs if one.level == evidence.level and (left := one.left_by(evidence)) is not None]
    new = [dataclasses.replace(one, digest=source_hash(folder, one.sources)) for one in (evidence, *more)]
    first, *rest = sorted([*new, *kept], key=lambda one: -len(one.families))
    current = dataclasses.replace(first, others=tuple(rest))
    target = evidence_file(origin, evidence.backend, evidence.platform)
    target.parent.mkdir(exist_ok=True)
    target.write_text(current.to_json())
    read_evidence.cache_clear()
    return target
