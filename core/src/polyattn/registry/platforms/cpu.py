"""The CPU and the features that kernels ask for."""

from __future__ import annotations

import re

from ...contract import DeviceReport
from .machine import Machine, text_of

__all__ = ["CPU_FEATURES", "detect_cpu"]

CPU_FEATURES = ("amx", "avx512", "sve")
"""Machine features that `detect_cpu` reports and that `cpu:amx+avx512` may assume."""


def detect_cpu(machine: Machine | None = None) -> DeviceReport:
    """Always present. `features` come from /proc/cpuinfo: amx (tile and bf16), avx512 (F), sve."""
    here = machine or Machine()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text_of(here.root / "proc/cpuinfo"), re.MULTILINE)
    name = f"{here.machine or 'unknown'} CPU"
    if match is None:
        return here.report(True, f"{name}, features unknown: /proc/cpuinfo lists none")
    flags = set(match[1].split())
    needs = {"amx": {"amx_tile", "amx_bf16"}, "avx512": {"avx512f"}, "sve": {"sve"}}
    features = [feature for feature in CPU_FEATURES if needs[feature] <= flags]
    return here.report(True, f"{name}, {'+'.join(features) or 'none of ' + ', '.join(CPU_FEATURES)}", features=features)
