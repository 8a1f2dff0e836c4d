"""The device and the versions that a report names."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

from .. import __version__
from ..registry.evidence import source_hash
from ..registry.manager import get_manager
from ..tuning import cpu_name

__all__ = ["code_digest", "device_name", "graph_class", "lost", "records_graphs", "versions"]


def device_name(device: torch.device) -> str:
    """The chip, as its vendor calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        name = getattr(torch.get_device_module(device), "get_device_name", None)
        return device.type if name is None else str(name(device))
    return f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def graph_class(device: torch.device) -> str:
    """The name of its graphs in its module of torch: torch.cuda.CUDAGraph, torch.xpu.XPUGraph."""
    return f"{device.type.upper()}Graph"


def records_graphs(device: torch.device) -> bool:
    """Return whether torch records graphs of this kind of device."""
    module = torch.get_device_module(device)
    return hasattr(module, "graph") and hasattr(module, graph_class(device))


def lost(device: torch.device) -> bool:
    """Return whether the device answers no more: errors of a kernel that read where it must not stay for good."""
    if device.type == "cpu":
        return False
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of everything that takes part on a device."""
    found = {"polyattn": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found["hip" if torch.version.hip else "cuda"] = torch.version.hip or torch.version.cuda or ""
        found["triton"] = _installed("triton")
        found["driver"] = _driver()
    elif device.type != "cpu":
        found[device.type] = getattr(torch.version, device.type, None) or ""
        found[f"torch-{device.type}"] = _installed(f"torch-{device.type}")
    return {name: version for name, version in found.items() if version}


@functools.cache
def code_digest() -> str:
    """Return the digest of all files of polyattn and of plugins with a backend: a version says which release, this what
    ran."""
    manager = get_manager()
    folders = {Path(manager.owner(info).origin).parent for info in manager.backends.values()}
    folders.add(Path(__file__).parents[1])
    digest = hashlib.sha256()
    for folder in sorted(folders, key=lambda each: each.name):
        files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        names = [path.as_posix() for path in files if "__pycache__" not in path.parts]
        digest.update(f"{folder.name} {source_hash(folder, names)}".encode())
    return digest.hexdigest()[:12]


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
