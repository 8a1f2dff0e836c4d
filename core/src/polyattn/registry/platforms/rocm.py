"""AMD GPUs, from the topology that the amdgpu kernel driver publishes."""

from __future__ import annotations

import os
import re

from ...contract import DeviceReport
from .machine import Machine, count_of, dotted, kinds_of, matching, text_of, version_of, visible

__all__ = ["detect_rocm", "gfx_name"]


def gfx_name(version: int) -> str:
    """The architecture behind the kernel driver's gfx_target_version: 90402 -> gfx942, 90010 -> gfx90a.

    The number is major * 10000 + minor * 100 + stepping; the name writes minor and stepping in hexadecimal.
    """
    major, rest = divmod(version, 10000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def detect_rocm(machine: Machine | None = None) -> DeviceReport:
    """AMD GPUs from the kernel driver's topology; `toolkit` is the ROCm version of the torch build, else installed."""
    here = machine or Machine()
    every = []
    nodes = matching(here.root / "sys/class/kfd/kfd/topology/nodes", "*/properties")
    for node in sorted(nodes, key=lambda path: len(path.parent.name)):  # 10 comes after 9
        match = re.search(r"^gfx_target_version (\d+)$", text_of(node), re.MULTILINE)
        if match and int(match[1]):  # 0: a CPU
            every.append(gfx_name(int(match[1])))
    if not every:
        return here.report(False, "no AMD GPU: /sys/class/kfd lists none (the amdgpu kernel driver provides it)")
    toolkit = version_of(here.torch.hip or text_of(here.root / "opt/rocm/.info/version"), 2)
    archs = every
    # The runtime filters first and numbers what is left; HIP then filters that, by its own name or CUDA's.
    own = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in here.environ else "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", own):
        archs, problem = visible(archs, variable, here.environ)
        if problem:
            gpus = f"{count_of(len(every), 'AMD GPU')} ({kinds_of(every)})"
            return here.report(False, f"{gpus}, but {problem}", every, toolkit)
    gpus = f"{count_of(len(archs), 'AMD GPU')} ({kinds_of(archs)})"
    node = here.root / "dev/kfd"
    if not os.path.exists(node):
        detail = f"{gpus}, but /dev/kfd is missing; in a container add --device=/dev/kfd --device=/dev/dri"
        return here.report(False, detail, archs, toolkit)
    if not os.access(node, os.R_OK | os.W_OK):
        detail = f"{gpus}, but this user may not open /dev/kfd; add the user to the group render"
        return here.report(False, detail, archs, toolkit)
    if not here.torch.hip:
        remedy = "install a ROCm build of PyTorch (pytorch.org/get-started/locally)"
        return here.report(False, here.without_build(gpus, "ROCm", remedy), archs, toolkit)
    return here.report(True, f"{gpus}, ROCm {dotted(toolkit) or here.torch.hip}", archs, toolkit)
