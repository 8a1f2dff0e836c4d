"""NVIDIA GPUs, through the driver's management library NVML: it answers without creating a CUDA context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ...contract import DeviceReport
from .machine import Machine, count_of, dotted, kinds_of, version_of, visible

__all__ = ["detect_cuda"]


class _NvmlError(Exception):
    """Says why NVML did not answer."""


class _Nvml:
    """The few NVML calls used here. Each checks its status; a failure says which call and NVML's own words."""

    def __init__(self, load: Callable[[], Any]) -> None:
        try:
            self.library = load()
        except OSError as cause:
            raise _NvmlError(f"no NVIDIA driver: its library NVML cannot be loaded ({cause})") from cause

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self.library, name)
        except AttributeError as cause:
            raise _NvmlError(f"NVML has no {name}: the NVIDIA driver is too old") from cause
        function.restype = ctypes.c_int
        status = function(*arguments)
        if status:
            raise _NvmlError(f"{name} failed with {status}{self.words(status)}")

    def words(self, status: int) -> str:
        describe = getattr(self.library, "nvmlErrorString", None)
        if describe is None:
            return ""
        describe.restype = ctypes.c_char_p
        said = describe(ctypes.c_int(status))
        return f" ({said.decode(errors='replace')})" if said else ""

    def archs(self) -> tuple[list[str], str]:
        """Return one architecture per device in NVML's (PCI) order, and why one is unknown (a GPU fell off the bus)."""
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found, problem = [], ""
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            try:
                self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
                self.call("nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
            except _NvmlError as failure:
                found.append("")
                problem = f"GPU {index}: {failure}"
            else:
                found.append(f"sm{major.value}{minor.value}")
        return found, problem

    def driver_cuda(self) -> tuple[int, ...]:
        """The newest CUDA version the driver supports."""
        version = ctypes.c_int()
        self.call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
        return (version.value // 1000, version.value % 1000 // 10)


def _ask_nvml(load: Callable[[], Any]) -> tuple[list[str], str, tuple[int, ...]]:
    nvml = _Nvml(load)
    nvml.call("nvmlInit_v2")
    try:
        archs, problem = nvml.archs()
        return archs, problem, nvml.driver_cuda()
    finally:
        # Its status says nothing about the answers already in hand.
        nvml.library.nvmlShutdown()


def detect_cuda(machine: Machine | None = None) -> DeviceReport:
    """NVIDIA GPUs through NVML; `toolkit` is the CUDA version of the torch build, else of the driver."""
    here = machine or Machine()
    hidden = here.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return here.report(False, f"CUDA_VISIBLE_DEVICES={hidden!r} hides every NVIDIA GPU")
    try:
        every, broken, driver = _ask_nvml(here.load_nvml)
    except _NvmlError as failure:
        return here.report(False, str(failure))
    if not any(every):
        return here.report(False, broken or "the NVIDIA driver is loaded, but it reports no GPU")
    archs, problem = visible(every, "CUDA_VISIBLE_DEVICES", here.environ)
    if problem:
        gpus = f"{count_of(len(every), 'NVIDIA GPU')} ({kinds_of(every)})"
        return here.report(False, f"{gpus}, but {problem}", every, driver)
    if here.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # CUDA numbers devices fastest first, NVML by bus: with mixed GPUs the numbers name different ones.
        archs = archs if len(set(every)) == 1 else every
    gpus = f"{count_of(len(archs), 'NVIDIA GPU')} ({kinds_of(archs)})"
    if not here.torch.cuda:
        remedy = f"install a PyTorch built for CUDA {dotted(driver)} or older (pytorch.org/get-started/locally)"
        return here.report(False, here.without_build(gpus, "CUDA", remedy), archs, driver)
    toolkit = version_of(here.torch.cuda, 2)
    detail = f"{gpus}, driver for CUDA {dotted(driver)}"
    if broken:
        detail += f"; {broken}"
    if driver[:1] < toolkit[:1]:
        detail += f", older than torch's CUDA {dotted(toolkit)}: update it if torch.cuda.is_available() is False"
    return here.report(True, detail, archs, toolkit)
