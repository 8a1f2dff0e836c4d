"""The device and the versions that a report names."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess

import torch

from .. import __version__
from ..tuning import cpu_name

__all__ = ["device_name", "versions"]


def device_name(device: torch.device) -> str:
    """The chip, as its vendor calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        name = getattr(torch.get_device_module(device), "get_device_name", None)
        return device.type if name is None else str(name(device))
    return f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def versions(device: torch.device) -> dict[str, str]:
    """Of everything that takes part on a device."""
    found = {"polyattn": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found["hip" if torch.version.hip else "cuda"] = torch.version.hip or torch.version.cuda or ""
        found["triton"] = _installed("triton")
        found["driver"] = _driver()
    return {name: version for name, version in found.items() if version}


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    """Version of NVIDIA's driver; empty where its tool is not there to tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip().splitlines()[0] if said.stdout.strip() else ""
