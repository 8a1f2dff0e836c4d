"""The GPU of Apple silicon."""

from __future__ import annotations

from ...contract import DeviceReport
from .machine import Machine

__all__ = ["detect_mps"]


def detect_mps(machine: Machine | None = None) -> DeviceReport:
    """The GPU of Apple silicon."""
    here = machine or Machine()
    if here.system != "darwin":
        return here.report(False, f"no Apple GPU: this is {here.system}, not macOS")
    if here.machine != "arm64":
        return here.report(False, f"no Apple GPU for PyTorch: this Mac is {here.machine}, not Apple silicon (arm64)")
    if not here.torch.version:
        return here.report(False, here.without_build("an Apple silicon GPU", "MPS", "pip install torch"))
    return here.report(True, "Apple silicon")
