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
from ..testing.machine import code_digest, device_name, versions
from ..user_files import MEGABYTE, read_text
from .bars import verdicts
from .pages import BENCHMARK
from .peers import Peer, versions_of
from .rows import Row
from .sheets import Sheet

__all__ = [
    "FORMAT", "HEAD", "ROW", "SAME", "begin", "difference_of", "kept", "load", "provenance", "resumed", "save",
    "summed",
]  # fmt: skip

FORMAT = 2
SAME = ("format", "device", "versions", "settings", "quick")
"""What must be equal where the rows of two runs are put into one file."""
HEAD = (
    "command", "date", "device", "versions", "settings", "sheets", "titles", "quick", "libraries", "lost", "rows",
    "verdicts",
)  # fmt: skip
"""What a result file has (`begin`), besides what it calls itself."""
ROW = (
    "date", "sheet", "family", "kind", "name", "model", "fields", "unit", "bound", "accepted", "anchors", "moved",
    "entries", "choice",
)  # fmt: skip
"""What is read of a row of it."""


def begin(
    sheet: Sheet,
    device: torch.device,
    peers: Mapping[str, Peer],
    command: Sequence[str],
    settings: Mapping[str, Any],
    *,
    quick: bool,
) -> dict[str, Any]:
    """The head of a result file. command: the words of the command line, without `polyattn`. settings: of them,
    `cli_options.BenchOptions.settings`."""
    return {
        "benchmark": BENCHMARK,
        "format": FORMAT,
        "command": shlex.join(["polyattn", *command]),
        "date": _today(),
        "device": device_name(device),
        "versions": {
            **versions(device),
            **_cudnn(device),
            **versions_of(peers),
        },
        "settings": {**settings, "peers": list(peers)},
        "sheets": dict(sheet.digests),
        "titles": dict(sheet.titles),
        "quick": quick,
        "libraries": {name: peer.library for name, peer in peers.items()},
        "lost": {},
        "rows": [],
        "verdicts": [],
    }


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def provenance(before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a row that is measured now says of that: the day, the code, and how many accepted measurements of it
    were there and are not kept. before: the last of them."""
    replaced = 0 if before is None else before.get("replaced", 0) + 1
    return {"date": _today(), "code": code_digest(), **({"replaced": replaced} if replaced else {})}


def _cudnn(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {"cudnn": str(version)} if version else {}


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def load(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ConfigError: it cannot be read, is no result of this command in this format, or lacks something.
    """
    try:
        found = json.loads(read_text(path, 64 * MEGABYTE), parse_constant=_no_number)
    except OSError as exc:
        raise ConfigError(f"result file {path} cannot be read: {exc}") from exc
    except (RecursionError, ValueError) as exc:
        raise ConfigError(f"result file {path} is not JSON ({exc}): name another, or remove it") from exc
    if not isinstance(found, dict) or (found.get("benchmark"), found.get("format")) != (BENCHMARK, FORMAT):
        raise ConfigError(f"{path} is no result of `polyattn bench` in format {FORMAT}: name another file")
    _check_whole(path, "", found, HEAD)
    if not isinstance(found["rows"], list):
        raise ConfigError(f"result file {path}: rows is no list: name another file, or measure again")
    _check_kinds(path, "", found, _KINDS)
    for number, row in enumerate(found["rows"]):
        where = f" of row {number}"
        _check_whole(path, where, row, ROW)
        _check_kinds(path, where, row, _KINDS)
        for name, entry in row["entries"].items():
            _check_kinds(path, f" of {name}{where}", {"entry": entry}, _KINDS)
            _check_kinds(path, f" of {name}{where}", entry, _KINDS)
            if "us" in entry:
                _check_whole(path, f" of {name}{where}", entry, _TIMED)
        _check_numbers(path, f" of anchors{where}", row["anchors"])
        _check_kinds(path, f" of choice{where}", row["choice"], dict.fromkeys(row["choice"], (str,)))
    for number, part in enumerate(found.get("parts", [])):
        where = f" of part {number}"
        _check_whole(path, where, part, ("anchors",))
        _check_kinds(path, where, part, _KINDS)
        _check_numbers(path, f" of anchors{where}", part["anchors"])
    for number, said in enumerate(found["verdicts"]):
        _check_verdict(path, f" of verdict {number}", said)
    return found


def _check_verdict(path: Path, where: str, said: Any) -> None:
    _check_whole(path, where, said, _VERDICT)
    _check_kinds(path, where, said, {**_KINDS, "rows": (int,)})
    if below := said.get("below"):
        _check_whole(path, f" of below{where}", below, ("limit", "rows"))
        _check_kinds(path, f" of below{where}", below, {"limit": (int, float), "rows": (dict,)})
        _check_numbers(path, f" of rows of below{where}", below["rows"])


_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("date", "device", "command", "sheet", "family", "name", "kind", "unit", "bound", "model"), (str,)),
    **dict.fromkeys(("versions", "settings", "sheets", "titles", "libraries", "lost"), (dict,)),
    **dict.fromkeys(("fields", "anchors", "entries", "choice", "entry"), (dict,)),
    **dict.fromkeys(("quick", "accepted"), (bool,)),
    **dict.fromkeys(("verdicts", "parts", "missing"), (list,)),
    **dict.fromkeys(("bar", "asked", "verdict", "least_row", "note", "code", "failed"), (str,)),
    **dict.fromkeys(("moved", "apart", "least", "geomean", "spread", "us", "rate", "percent"), (int, float)),
    **dict.fromkeys(("peak_bytes", "replaced"), (int,)),
    "below": (dict,),
}
_VERDICT = ("bar", "asked", "verdict", "rows", "missing")
"""What a verdict has, whatever it is."""
_TIMED = ("us", "rate", "percent")
"""What an entry has that has a time."""


def _check_numbers(path: Path, part: str, found: Mapping[str, Any]) -> None:
    _check_kinds(path, part, found, dict.fromkeys(found, (int, float)))


def _check_kinds(path: Path, part: str, found: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> None:
    for name in found.keys() & kinds.keys():
        value, allowed = found[name], kinds[name]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ConfigError(
                f"result file {path}: {name}{part} is {str(value)[:40]!r}, which is no {allowed[-1].__name__}. Name "
                f"another file, or measure again"
            )


def _check_whole(path: Path, part: str, found: Any, names: Sequence[str]) -> None:
    missing = [name for name in names if not isinstance(found, dict) or name not in found]
    if missing:
        raise ConfigError(
            f"result file {path} is not whole: {', '.join(missing)}{part} is missing. Name another file, or measure "
            f"again"
        )


def resumed(now: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return what a run of today goes on with: the rows of the file, the rest as it is now.

    Raises:
        ConfigError: the file is of another device, of other versions, or was measured with other settings: its rows
            say nothing beside today's.
    """
    before = load(path)
    for name in SAME:
        if before.get(name) != now[name]:
            said = difference_of(before.get(name), now[name], ("there", "here"))
            raise ConfigError(
                f"--resume: {name} of {path} differs from what is here ({said}): rows measured apart are not put into "
                f"one file. Name another with --out"
            )
    commands = [*before["command"].split("; "), now["command"].replace(" --resume", "")]
    return {
        **now,
        "command": "; ".join(dict.fromkeys(commands)),
        "sheets": {**before["sheets"], **now["sheets"]},
        "titles": {**before["titles"], **now["titles"]},
        "libraries": {**before["libraries"], **now["libraries"]},
        "lost": before["lost"],
        **{name: before[name] for name in ("parts",) if name in before},
        "rows": before["rows"],
    }


def kept(result: Mapping[str, Any], row: Row) -> dict[str, Any] | None:
    """Return what is known of a row: accepted, and measured with the sizes that it has today."""
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
    """The result with its verdicts, in the order of the sheets. rows: all that a complete run has; others of these
    sheets are kept, `gone`. The times of a quick run mean nothing: it has no verdicts."""
    every = list(rows)
    order = {(row.family, row.name): number for number, row in enumerate(every)}
    found = sorted(result["rows"], key=lambda row: order.get((row["family"], row["name"]), len(every)))
    gone = [row["sheet"] in sheet.digests and (row["family"], row["name"]) not in order for row in found]
    found = [{**row, "gone": True} if left else row for row, left in zip(found, gone, strict=True)]
    return {**result, "rows": found, "verdicts": [] if result["quick"] else verdicts(sheet.bars, every, found)}


def difference_of(one: Any, other: Any, places: tuple[str, str]) -> str:
    """Return what differs between the heads of two result files, for people. places: where each is from."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        pairs = [(f"{name}: ", one.get(name, "none"), other.get(name, "none")) for name in names]
    else:
        pairs = [("", "none" if one is None else one, "none" if other is None else other)]
    return ", ".join(f"{name}{first} {places[0]}, {second} {places[1]}" for name, first, second in pairs)
