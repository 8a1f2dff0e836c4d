"""What a command line asks for, in plain words: for the run, for the command that a result names, and for processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..inspection import detect
from ..plugins import get_manager
from . import peers
from .running import Plan
from .sheets import Sheet, read, selected

__all__ = ["Asked"]


@dataclasses.dataclass(frozen=True)
class Asked:
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

    def words(self) -> list[str]:
        """The command line that asks for the same, without `polyattn`; defaults are left out."""
        words = ["bench", *self.sheets]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "sheets" or value == field.default:
                continue
            flag, values = f"--{field.name}", value if isinstance(value, tuple) else (value,)
            words += [flag] if value is True else [word for one in values for word in (flag, str(one))]
        return words

    def settings(self) -> dict[str, Any]:
        """How rows are measured: what those must have in common that are shown together."""
        return {"seconds": self.seconds, "tune": self.tune, "candidates": list(self.candidates)}

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Asked:
        """What `plain` made, read back from JSON."""
        words: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in plain.items()}
        return cls(**words)

    def where(self) -> torch.device:
        """
        Raises:
            ConfigError: torch has no such device here.
        """
        return _device(self.device)

    def plan(self) -> tuple[Plan, Sheet]:
        """
        Raises:
            ConfigError: sheets, rows, peers or a device that are not there; a CPU without `quick`.
        """
        sheet = read([Path(path) for path in self.sheets])
        rows = [row for family in selected(sheet, self.rows) for row in family.rows]
        known = peers.load(self.peers)
        wanted = peers.named(known, self.peer, "--peer") if known else []
        device = self.where()
        if device.type == "cpu" and not self.quick:
            raise ConfigError(
                "the rows of a sheet take hours on a CPU: --quick makes them tiny, --device names another"
            )
        named = {name: known[name] for name in wanted}
        how = (self.seconds, self.limit, self.quick, self.tune, self.again)
        return Plan(rows, named, self.candidates, device, *how), sheet


def _device(word: str) -> torch.device:
    if word == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        word = found.type if found is not None else "cpu"
    try:
        device = torch.device(word)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        raise ConfigError(f"--device {word}: torch has no such device here: {_absent(word, exc)}") from exc
    return torch.device(device.type, 0) if device.type != "cpu" and device.index is None else device


def _absent(word: str, error: Exception) -> str:
    """Why: what the detection of this kind of device says, or the first sentence of torch where there is such a device
    or nobody knows the kind."""
    kinds = [name for name, info in get_manager().platforms.items() if info.device_type == word.partition(":")[0]]
    reports = [detect(name) for name in kinds]
    if reports and not any(report.present for report in reports):
        return "; ".join(report.detail for report in reports)
    return str(error).partition("\n")[0].partition(". ")[0]
