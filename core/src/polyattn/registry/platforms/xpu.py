"""Intel GPUs, from their render nodes and PCI ids (as listed in the Linux kernel's include/drm/intel/pciids.h)."""

from __future__ import annotations

import re

from ...contract import DeviceReport
from .machine import Machine, count_of, kinds_of, matching, text_of

__all__ = ["XPU_FEATURES", "detect_xpu"]

XPU_FEATURES = {"pvc": ("xmx",), "bmg": ("xmx",)}
"""Architecture -> machine features: matrix engines."""

_PVC = {0x0B69, 0x0B6E, *range(0x0BD0, 0x0BDC), 0x0BE0, 0x0BE1, 0x0BE5}
_BMG = {*range(0xE200, 0xE230)}


def _xpu_arch(device_id: str) -> str:
    try:
        number = int(device_id, 16)
    except ValueError:
        return ""
    return "pvc" if number in _PVC else "bmg" if number in _BMG else ""


def detect_xpu(machine: Machine | None = None) -> DeviceReport:
    """Intel GPUs with a render node; `toolkit` is the SYCL compiler version of the torch build."""
    here = machine or Machine()
    archs = []
    for vendor in matching(here.root / "sys/class/drm", "card*/device/vendor"):
        device = vendor.parent
        # Connectors (card0-DP-1) link to the same device; a card without a render node only drives a screen.
        if "-" in device.parent.name or not matching(device, "drm/renderD*"):
            continue
        if text_of(vendor).strip().lower() == "0x8086":
            archs.append(_xpu_arch(text_of(device / "device").strip()))
    if not archs:
        return here.report(False, "no Intel GPU: /sys/class/drm has no render node of vendor 0x8086")
    features = dict.fromkeys(feature for arch in archs for feature in XPU_FEATURES.get(arch, ()))
    gpus = f"{count_of(len(archs), 'Intel GPU')} ({kinds_of(archs)})"
    if not here.torch.xpu:
        remedy = "install an XPU build of PyTorch (pytorch.org/get-started/locally)"
        return here.report(False, here.without_build(gpus, "XPU", remedy), archs, (), features)
    return here.report(True, gpus, archs, _sycl_version(here.torch.xpu), features)


def _sycl_version(text: str) -> tuple[int, ...]:
    """20250102 -> (2025, 1, 2), the compiler's YYYYMMUU; other spellings have no version to read."""
    match = re.fullmatch(r"(20\d\d)(\d\d)(\d\d)", text.strip())
    return tuple(int(part) for part in match.groups()) if match else ()
