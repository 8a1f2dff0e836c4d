"""This module says what `--device` means."""

from __future__ import annotations

import torch

from ...errors import ConfigError
from ...registry.manager import get_manager
from ...selection.inspection import detect

__all__ = ["named_device"]


def named_device(word: str) -> torch.device:
    """The device of torch that `word` names; `auto`: the accelerator that is current, else the CPU.

    Raises:
        ConfigError: torch has no such device, or none here.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if word == "auto":
        word = "cpu" if found is None else f"{found.type}:{torch.accelerator.current_device_index()}"
    try:
        device = torch.device(word)
        torch.empty(1, device=device).cpu()  # "meta" makes tensors too, and there is nothing in them
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        raise ConfigError(f"--device {word}: torch has no such device here: {_absent(word, exc)}") from exc
    if device.type == "cpu":
        if device.index:
            raise ConfigError(f"--device {word}: torch has no such device here: it has one cpu, named cpu")
        return torch.device("cpu")
    return torch.device(device.type, device.index or 0)


def _absent(word: str, error: Exception) -> str:
    """Why: what the detection of this kind of device says, or the first sentence of torch where there is such a device.
    Of a kind that no platform has: what is here, since torch lists kinds that nobody has."""
    found = {name: (info.device_type, detect(name)) for name, info in get_manager().platforms.items()}
    reports = [report for kind, report in found.values() if kind == word.partition(":")[0]]
    if not reports:
        return f"it has {', '.join(dict.fromkeys(kind for kind, report in found.values() if report.present))}"
    if not any(report.present for report in reports):
        return f"{'; '.join(report.detail for report in reports)}. `polyattn doctor` says why"
    return str(error).partition("\n")[0].partition(". ")[0]
