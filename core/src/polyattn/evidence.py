"""Evidence files: what a conformance run showed for a backend on a device, kept beside the plugin that owns it.

`evidence/<name>@<platform>.json` next to the plugin's module holds level, device, versions, date, counts and a hash
of the sources that ran. When those sources change the evidence reads *stale* until it is run again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from .errors import PluginError
from .records import EvidenceLevel

__all__ = ["LEVELS", "Evidence", "read_evidence", "source_hash", "write_evidence"]

LEVELS: tuple[str, ...] = get_args(EvidenceLevel)
"""Strongest first."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What was run. `sources`: files relative to the plugin's folder; `digest`: their hash when it ran; `absent`:
    providers of the backend that were not there, of which it shows nothing."""

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
    absent: tuple[str, ...] = ()
    stale: bool = False

    def to_json(self) -> str:
        """The text of an evidence file."""
        data = dataclasses.asdict(self)
        data.pop("stale")
        return json.dumps(data, indent=1, sort_keys=True) + "\n"

    def __str__(self) -> str:
        if self.level == "declared":
            return "declared"
        xfailed = f"{self.xfailed} xfailed" if self.xfailed else ""
        partly = "in part" if self.absent else ""
        where = ", ".join(part for part in (self.device, self.date, xfailed, partly) if part)
        return f"{self.level}{' (' + where + ')' if where else ''}{', stale' if self.stale else ''}"


def source_hash(folder: Path, sources: Iterable[str]) -> str:
    """sha256 over names and contents of `sources`; a missing file counts as empty."""
    digest = hashlib.sha256()
    for name in sorted(sources):
        path = folder / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b"") + b"\0")
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=256)
def read_evidence(origin: str, backend: str, platform: str) -> Evidence:
    """The evidence of a backend whose plugin was loaded from file `origin`; level `declared` when there is none.

    Raises:
        PluginError: the file is there but is not an evidence file.
    """
    if not origin:
        return Evidence(backend, platform, "declared")
    folder = Path(origin).parent
    path = folder / "evidence" / f"{backend}@{platform}.json"
    if not path.is_file():
        return Evidence(backend, platform, "declared")
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        data |= {name: tuple(data.get(name, ())) for name in ("sources", "absent")}
        evidence = Evidence(**data)
    except (ValueError, TypeError) as exc:
        raise PluginError(
            f"{path.name} is not an evidence file: {exc}; run `polyattn conform {backend}` again"
        ) from exc
    if evidence.level not in LEVELS:
        raise PluginError(f"{path.name}: level {evidence.level!r} is not one of {', '.join(LEVELS)}")
    return dataclasses.replace(evidence, stale=evidence.digest != source_hash(folder, evidence.sources))


def write_evidence(origin: str, evidence: Evidence) -> Path:
    """Write `evidence` beside the plugin, with the hash of its sources as they are now."""
    folder = Path(origin).parent
    current = dataclasses.replace(evidence, digest=source_hash(folder, evidence.sources))
    target = folder / "evidence" / f"{evidence.backend}@{evidence.platform}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(current.to_json())
    read_evidence.cache_clear()
    return target
