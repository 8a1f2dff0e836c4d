"""Result files: what a run says of itself, and how it goes on with what an earlier one left."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..testing.machine import device_name, versions
from .bars import verdicts
from .pages import BENCHMARK
from .peers import Peer, versions_of
from .rows import Row
from .sheets import Sheet

__all__ = ["FORMAT", "begin", "kept", "load", "resumed", "save", "summed"]

FORMAT = 1
_SAME = ("format", "device", "versions", "quick")
"""What must be equal where the rows of two runs are put into one file."""


def begin(
    sheet: Sheet, device: torch.device, peers: Mapping[str, Peer], command: Sequence[str], *, quick: bool
) -> dict[str, Any]:
    """The head of a result file. command: the words of the command line, without `polyattn`."""
    return {
        "benchmark": BENCHMARK,
        "format": FORMAT,
        "command": shlex.join(["polyattn", *command]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": device_name(device),
        "versions": {
            **versions(device),
            **_cudnn(device),
            **versions_of(peers),
        },
        "sheets": dict(sheet.digests),
        "titles": dict(sheet.titles),
        "quick": quick,
        "libraries": {name: peer.library for name, peer in peers.items()},
        "lost": {},
        "rows": [],
        "verdicts": [],
    }


def _cudnn(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {"cudnn": str(version)} if version else {}


def load(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ConfigError: it cannot be read, or is no result of this command in this format.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"result file {path} cannot be read: {exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"result file {path} is not JSON ({exc}): name another, or remove it") from exc
    if not isinstance(found, dict) or (found.get("benchmark"), found.get("format")) != (BENCHMARK, FORMAT):
        raise ConfigError(f"{path} is no result of `polyattn bench` in format {FORMAT}: name another file")
    return found


def resumed(now: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a run of today goes on with: the rows of the file, the rest as it is now.

    Raises:
        ConfigError: the file is of another device, or of other versions: its rows say nothing beside today's.
    """
    before = load(path)
    for name in _SAME:
        if before[name] != now[name]:
            raise ConfigError(
                f"--resume: {name} of {path} differs from what is here ({_difference(before[name], now[name])}): rows "
                f"measured apart are not put into one file. Name another with --out"
            )
    commands = [*before["command"].split("; "), now["command"].replace(" --resume", "")]
    return {
        **now,
        "command": "; ".join(dict.fromkeys(commands)),
        "sheets": {**before["sheets"], **now["sheets"]},
        "titles": {**before["titles"], **now["titles"]},
        "libraries": {**before["libraries"], **now["libraries"]},
        "lost": before["lost"],
        "rows": before["rows"],
    }


def kept(result: Mapping[str, Any], row: Row) -> dict[str, Any] | None:
    """What is known of a row: accepted, and measured with the sizes that it has today."""
    for found in result["rows"]:
        same = found["family"] == row.family and found["kind"] == row.kind and found["fields"] == row.fields()
        if same and found["accepted"]:
            return dict(found)
    return None


def save(result: dict[str, Any], path: Path) -> None:
    """Write all of it or nothing: a run that is killed here leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=1) + "\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def summed(result: dict[str, Any], sheet: Sheet, rows: Iterable[Row]) -> dict[str, Any]:
    """The result with its verdicts. rows: all that a complete run has."""
    return {**result, "verdicts": verdicts(sheet.bars, list(rows), result["rows"])}


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return ", ".join(f"{name}: {before.get(name, 'none')} there, {now.get(name, 'none')} here" for name in names)
    return f"{before} there, {now} here"
