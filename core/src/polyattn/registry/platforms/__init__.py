"""Recognise device kinds without importing torch and without initialising a device.

One file per platform. Each `detect_...` reads files (/sys, /dev, /proc, torch's version.py, installed distributions)
or, for NVIDIA, asks NVML. What goes wrong becomes the `detail` of the report: detection never raises. A device counts
as present when this process's PyTorch could use it; what was found is reported either way.
"""

from ...contract.platforms import CORE_PLATFORMS
from .assume import AssumedPlatform, parse_platform
from .cpu import CPU_FEATURES, detect_cpu
from .cuda import detect_cuda
from .machine import Machine, TorchBuild, torch_build
from .mps import detect_mps
from .musa import detect_musa
from .npu import detect_npu
from .rocm import detect_rocm, gfx_name
from .xpu import detect_xpu

__all__ = [
    "CORE_PLATFORMS",
    "CPU_FEATURES",
    "AssumedPlatform",
    "Machine",
    "TorchBuild",
    "detect_cpu",
    "detect_cuda",
    "detect_mps",
    "detect_musa",
    "detect_npu",
    "detect_rocm",
    "detect_xpu",
    "gfx_name",
    "parse_platform",
    "torch_build",
]
