"""This module reads what a command line asks for: for the run, for the command that a result names, and for
processes."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, InvalidInputError, did_you_mean
from ..registry.manager import get_manager
from ..selection.aliases import own_names
from . import peers
from .bars import OBJECTS, OWN
from .measure.clock import OF_ROUNDS
from .measure.devices import named_device
from .peers import Peer
from .rows import Row
from .running import Plan
from .sheets import Sheet, read, selected
from .tuner.offline import isolation_of
from .workloads import workload

__all__ = ["BenchOptions"]


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """The words of `polyattn bench` that say what is measured, and how; the flags of the command explain them."""

    sheets: tuple[str, ...]
    rows: tuple[str, ...] = ("*",)
    candidates: tuple[str, ...] = ("*",)
    peers: tuple[str, ...] = ()
    peer: tuple[str, ...] = ("*",)
    device: str = "auto"
    quick: bool = False
    tune: bool = False
    seconds: float = 0.03
    limit: float = 3600.0
    again: bool = False
    isolate: str = "auto"

    def words(self) -> list[str]:
        """The command line that asks for the same, without `polyattn`; defaults are left out."""
        words = ["bench", *self.sheets]
        for flag, value in self.given().items():
            values = value if isinstance(value, tuple) else (value,)
            words += [flag] if value is True else [word for one in values for word in (flag, str(one))]
        return words

    def given(self) -> dict[str, Any]:
        """Flag -> its value, of those that are not left at their defaults."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "sheets"}
        return {f"--{field.name}": value for field, value in values.items() if value != field.default}

    def settings(self) -> dict[str, Any]:
        """How rows are measured: what those must have in common that are shown together."""
        return {"seconds": self.seconds, "tune": self.tune, "candidates": list(self.candidates), "of_rounds": OF_ROUNDS}

    def plain(self) -> dict[str, Any]:
        """Return the options as data for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> BenchOptions:
        """Return what `plain` made, read back from JSON."""
        words: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in plain.items()}
        return cls(**words)

    def where(self) -> torch.device:
        """
        Raises:
            ConfigError: torch has no such device here.
        """
        return named_device(self.device)

    @functools.cached_property
    def listed(self) -> dict[str, Peer]:
        """The peers of all places, whether they are asked for or not."""
        return peers.load(self.peers)

    def unknown_targets(self, sheet: Sheet) -> list[str]:
        """Return one line per bar that names an unknown candidate or peer. This is no error: the plugin, the folder of
        peers or the sheet may simply not be here."""
        backends = _candidates()
        families = [family.name for family in sheet.families]
        said = []
        for bar in sheet.bars:
            if not any(fnmatch.filter(families, pattern) for pattern in bar.of):
                said.append(f"bar {bar.name}: these sheets have no family {', '.join(bar.of)}; it gets no verdict")
                continue
            for role, name in (("who", bar.who), ("than", "" if bar.match else bar.than)):
                own, bare = name.startswith(OWN), name.removeprefix(OWN)
                known = backends if own else set(self.listed)
                # Without --peers no peer is known, and any name may be one's.
                if name and known and not fnmatch.filter(known, bare) and name not in OBJECTS:
                    what = "backend that is installed here" if own else "peer that --peers lists"
                    near = did_you_mean(bare, known)
                    said.append(f"bar {bar.name}: {role} {name!r} is no {what}.{near} It stays incomplete")
        return said

    def check_limits(self) -> None:
        """
        Raises:
            ConfigError: a number of seconds that is none.
        """
        for flag, value in (("--seconds", self.seconds), ("--limit", self.limit)):
            if not math.isfinite(value):
                raise ConfigError(f"{flag} {value}: give a finite number of seconds")

    def plan(self) -> tuple[Plan, Sheet]:
        """
        Raises:
            ConfigError: sheets, rows, backends, peers or a device that are not there; a row that no call is like; a
                CPU without `quick`; a word that says nothing.
        """
        self.check_limits()
        isolation = isolation_of(self.isolate)
        sheet = read([Path(path) for path in self.sheets])
        rows = [row for family in selected(sheet, self.rows) for row in family.rows]
        peers.named(_candidates(), self.candidates, "--candidates")
        known = self.listed
        if self.peer != ("*",) and not self.peers:
            raise ConfigError(
                f"--peer {' --peer '.join(self.peer)}: which peers there are, --peers says: name a folder or a module "
                f"with it, or leave --peer out"
            )
        wanted = peers.named(known, self.peer, "--peer") if known else []
        device = self.where()
        for row in rows:
            _check(row, device)
        if device.type == "cpu" and not self.quick:
            raise ConfigError(
                "the rows of a sheet take hours on a CPU: --quick makes them tiny, --device names another"
            )
        named = {name: known[name] for name in wanted}
        how = (self.seconds, self.limit, self.quick, self.tune, self.again, isolation)
        return Plan(rows, named, self.candidates, device, *how), sheet


def _candidates() -> dict[str, None]:
    """Names that candidates may have."""
    return dict.fromkeys(name for info in get_manager().backends.values() for name in own_names(info))


def _check(row: Row, device: torch.device) -> None:
    """Raise what layers and caches refuse before hours of measuring, not at the row."""
    try:
        workload(row, device)
    except (ConfigError, InvalidInputError) as exc:
        raise ConfigError(f"sheet {row.sheet}: row {row.id}: {exc}") from exc
