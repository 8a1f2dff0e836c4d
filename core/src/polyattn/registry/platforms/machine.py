"""This module holds all that detection reads of a machine, as one object that tests can replace."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...contract import DeviceReport

__all__ = [
    "Machine",
    "TorchBuild",
    "count_of",
    "dotted",
    "kinds_of",
    "matching",
    "text_of",
    "torch_build",
    "version_of",
    "visible",
]


@dataclass(frozen=True)
class TorchBuild:
    """The installed PyTorch, read from its version.py. Empty strings: not installed, or not built for that device."""

    version: str = ""
    cuda: str = ""
    hip: str = ""
    xpu: str = ""

    def __str__(self) -> str:
        if not self.version:
            return "not installed"
        builds = (f"{name} {value}" for name in ("cuda", "hip", "xpu") if (value := getattr(self, name)))
        return ", ".join((self.version, *builds))


def torch_build() -> TorchBuild:
    """The installed PyTorch build, found on the import path and parsed as text: torch is not imported."""
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # torch is in sys.modules without a spec: a stand-in, not PyTorch
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        text = text_of(Path(folder) / "version.py")
        if text:
            return _parse_version(text)
    return TorchBuild()


def _parse_version(text: str) -> TorchBuild:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return TorchBuild()
    found: dict[str, str] = {}
    for node in body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value)))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(value)))
            ):
                found[name] = value
            case _:
                continue
    version = found.get("__version__", "")
    # Some XPU builds leave `xpu` empty and say it in the version's local part only.
    xpu = found.get("xpu", "") or (version if "+xpu" in version else "")
    return TorchBuild(version, found.get("cuda", ""), found.get("hip", ""), xpu)


def _installed(distribution: str) -> str:
    """Version of an installed distribution, empty when it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _load_nvml() -> Any:
    return ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")


@dataclass(frozen=True)
class Machine:
    """Holds everything that detection may read, so that tests can describe machines this code has never run on.

    Attributes:
        root: parent of sys/, dev/, proc/, opt/ and usr/.
        environ: environment variables.
        torch: the installed PyTorch.
        installed: distribution name -> version, empty = not installed.
        load_nvml: returns NVIDIA's management library; OSError = there is none.
        system, machine: `sys.platform` and `platform.machine()`.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    torch: TorchBuild = field(default_factory=torch_build)
    installed: Callable[[str], str] = _installed
    load_nvml: Callable[[], Any] = _load_nvml
    system: str = sys.platform
    machine: str = field(default_factory=platform.machine)

    def report(
        self,
        present: bool,
        detail: str,
        archs: Iterable[str] = (),
        toolkit: tuple[int, ...] = (),
        features: Iterable[str] = (),
    ) -> DeviceReport:
        known = tuple(dict.fromkeys(arch for arch in archs if arch))
        return DeviceReport(present, detail, known, toolkit, tuple(features), str(self.torch))

    def without_build(self, device: str, build: str, remedy: str) -> str:
        """The sentence for a device that is there while PyTorch is not built for it."""
        if not self.torch.version:
            return f"found {device}, but PyTorch is not installed; {remedy}"
        return f"found {device}, but torch {self.torch} is not built for {build}; {remedy}"


def text_of(path: Path) -> str:
    """A file's text, empty when it cannot be read: /sys entries come and go, and may be unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def matching(folder: Path, pattern: str) -> list[Path]:
    """The paths below `folder` that match, sorted; none when it cannot be listed."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def version_of(text: str, parts: int = 3) -> tuple[int, ...]:
    """Leading numbers of a version: "13.0" -> (13, 0), "8.1.RC1" -> (8, 1), "" -> ()."""
    match = re.match(r"\s*(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match[1].split(".")[:parts]) if match else ()


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def count_of(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def kinds_of(archs: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(arch or "unknown architecture" for arch in archs))


def visible(devices: list[str], variable: str, environ: Mapping[str, str]) -> tuple[list[str], str]:
    """The devices that a ..._VISIBLE_DEVICES variable leaves, and a sentence when it leaves none.

    The list ends at the first entry that is no device; empty and -1 hide everything, as torch counts devices. A
    device named by UUID is not told apart here: all stay.
    """
    value = environ.get(variable)
    if value is None:
        return devices, ""
    kept = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith(("GPU-", "MIG-")):
            return devices, ""
        if not entry.isascii() or not entry.isdigit() or int(entry) >= len(devices):
            break
        kept.append(devices[int(entry)])
    return kept, "" if kept else f"{variable}={value!r} hides all of them"
