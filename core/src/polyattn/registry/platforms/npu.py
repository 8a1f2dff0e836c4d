"""Ascend NPUs, from their device nodes and PCI ids."""

from __future__ import annotations

import re
from pathlib import Path

from ...contract import DeviceReport
from .machine import Machine, count_of, dotted, kinds_of, matching, text_of, version_of

__all__ = ["detect_npu"]

_ASCEND = {
    "0xd100": "ascend310",
    "0xd500": "ascend310p",
    "0xd801": "ascend910",
    "0xd802": "ascend910b",
    "0xd803": "ascend910_93",
}


def detect_npu(machine: Machine | None = None) -> DeviceReport:
    """Ascend NPUs from /dev/davinciN and their PCI ids; `toolkit` is the CANN version."""
    here = machine or Machine()
    nodes = [path for path in matching(here.root / "dev", "davinci*") if path.name.removeprefix("davinci").isdigit()]
    if not nodes:
        detail = "no Ascend NPU: there is no /dev/davinci0 (in a container add --device=/dev/davinci0)"
        return here.report(False, detail)
    archs = []
    for vendor in matching(here.root / "sys/bus/pci/devices", "*/vendor"):
        if text_of(vendor).strip().lower() == "0x19e5":
            archs.append(_ASCEND.get(text_of(vendor.parent / "device").strip().lower(), ""))
    archs = [arch for arch in archs if arch]
    toolkit = _cann_version(here)
    npus = f"{count_of(len(nodes), 'Ascend NPU')} ({kinds_of(archs or [''])})"
    adapter = here.installed("torch-npu")
    if not adapter:
        detail = f"{npus}, but torch-npu is not installed; pip install torch-npu of the version of your torch"
        return here.report(False, detail, archs, toolkit)
    if not here.torch.version:
        return here.report(False, here.without_build(npus, "NPU", "pip install torch"), archs, toolkit)
    cann = f"CANN {dotted(toolkit)}" if toolkit else "CANN not found"
    return here.report(True, f"{npus}, torch-npu {adapter}, {cann}", archs, toolkit)


def _cann_version(here: Machine) -> tuple[int, ...]:
    homes = [here.root / "usr/local/Ascend" / name for name in ("cann", "ascend-toolkit/latest")]
    if named := here.environ.get("ASCEND_TOOLKIT_HOME"):
        homes.insert(0, Path(named))
    for home in homes:
        for info in matching(home, "*/ascend_toolkit_install.info"):
            if match := re.search(r"^version=(\S+)", text_of(info), re.MULTILINE):
                return version_of(match[1])
    return ()
