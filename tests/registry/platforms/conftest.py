"""Machines that are not here: fake /sys, /dev and /proc trees, and a stand-in for NVIDIA's library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyattn.registry.platforms import Machine, TorchBuild

CPU_BUILD = TorchBuild("2.13.0+cpu")


class FakeNvml:
    """Answers the NVML calls that detection makes, through the same C pointers as the library.

    Args:
        capabilities: (major, minor) per GPU, or a status code for a GPU that does not answer.
        cuda: driver's CUDA version as NVML writes it, 13000 for 13.0.
        statuses: call -> status it fails with.
    """

    def __init__(
        self,
        capabilities: tuple[tuple[int, int] | int, ...] = ((9, 0),),
        cuda: int = 13000,
        statuses: dict[str, int] | None = None,
    ) -> None:
        self.calls: list[str] = []

        def call(name: str, answer: Callable[..., int] = lambda *_: 0) -> None:
            def function(*arguments: Any) -> int:
                self.calls.append(name)
                return (statuses or {}).get(name, 0) or answer(*arguments)

            setattr(self, name, function)

        def count(out: Any) -> int:
            out._obj.value = len(capabilities)
            return 0

        def handle(index: ctypes.c_uint, out: Any) -> int:
            found = capabilities[index.value]
            if isinstance(found, int):
                return found
            out._obj.value = index.value + 1
            return 0

        def capability(device: ctypes.c_void_p, major: Any, minor: Any) -> int:
            assert device.value is not None
            major._obj.value, minor._obj.value = capabilities[device.value - 1]  # type: ignore[misc]
            return 0

        def driver(out: Any) -> int:
            out._obj.value = cuda
            return 0

        call("nvmlInit_v2")
        call("nvmlDeviceGetCount_v2", count)
        call("nvmlDeviceGetHandleByIndex_v2", handle)
        call("nvmlDeviceGetCudaComputeCapability", capability)
        call("nvmlSystemGetCudaDriverVersion_v2", driver)
        call("nvmlShutdown")

        def words(status: ctypes.c_int) -> bytes:
            return {9: b"Driver Not Loaded", 15: b"GPU is lost"}.get(status.value, b"")

        self.nvmlErrorString = words


def no_nvml() -> Any:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


@pytest.fixture
def nvml() -> type[FakeNvml]:
    return FakeNvml


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[str, str], Path]:
    """`plant("sys/class/x", "text")` puts a file into the fake tree."""

    def put(path: str, text: str = "") -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return put


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Machine]:
    """`machine(torch=..., environ=..., ...)`: a Linux machine with nothing but what the test planted."""

    def build(distributions: dict[str, str] | None = None, **fields: Any) -> Machine:
        defaults: dict[str, Any] = {
            "root": tmp_path,
            "environ": {},
            "torch": CPU_BUILD,
            "installed": lambda name: (distributions or {}).get(name, ""),
            "load_nvml": no_nvml,
            "system": "linux",
            "machine": "x86_64",
        }
        return Machine(**{**defaults, **fields})

    return build
