"""CUDA detection against a stand-in for NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyattn.registry.platforms import Machine, TorchBuild, detect_cuda

MachineFactory = Callable[..., Machine]
CUDA_BUILD = TorchBuild("2.13.0+cu130", cuda="13.0")


def test_a_gpu_with_a_cuda_build(machine: MachineFactory, nvml: Any) -> None:
    library = nvml(((9, 0), (9, 0)), cuda=13010)
    report = detect_cuda(machine(torch=CUDA_BUILD, load_nvml=lambda: library))
    assert report.present
    assert report.archs == ("sm90",)
    assert report.toolkit == (13, 0)
    assert report.torch_build == "2.13.0+cu130, cuda 13.0"
    assert report.detail == "2 NVIDIA GPUs (sm90), driver for CUDA 13.1"
    assert library.calls[0] == "nvmlInit_v2"
    assert library.calls[-1] == "nvmlShutdown"


def test_a_gpu_without_a_cuda_build(machine: MachineFactory, nvml: Any) -> None:
    remedy = "install a PyTorch built for CUDA 12.8 or older (pytorch.org/get-started/locally)"
    for torch, said in {
        TorchBuild("2.13.0+cpu"): "torch 2.13.0+cpu is not built for CUDA",
        TorchBuild("2.11.0+rocm7.1", hip="7.1.2"): "torch 2.11.0+rocm7.1, hip 7.1.2 is not built for CUDA",
        TorchBuild(): "PyTorch is not installed",
    }.items():
        report = detect_cuda(machine(torch=torch, load_nvml=lambda: nvml(((12, 0),), cuda=12080)))
        assert not report.present
        assert report.archs == ("sm120",)
        assert report.toolkit == (12, 8)
        assert report.detail == f"found 1 NVIDIA GPU (sm120), but {said}; {remedy}"


def test_a_driver_older_than_torch(machine: MachineFactory, nvml: Any) -> None:
    report = detect_cuda(machine(torch=CUDA_BUILD, load_nvml=lambda: nvml(((9, 0),), cuda=12080)))
    assert report.present
    assert report.toolkit == (13, 0)
    assert report.detail == (
        "1 NVIDIA GPU (sm90), driver for CUDA 12.8, older than torch's CUDA 13.0: "
        "update it if torch.cuda.is_available() is False"
    )


@pytest.mark.parametrize("value", ["", "-1", " ", "-1,0"])
def test_hidden_gpus(machine: MachineFactory, nvml: Any, value: str) -> None:
    here = machine(torch=CUDA_BUILD, environ={"CUDA_VISIBLE_DEVICES": value}, load_nvml=lambda: nvml(((9, 0),)))
    report = detect_cuda(here)
    assert not report.present
    assert report.detail.startswith(
        f"CUDA_VISIBLE_DEVICES={value!r} hides every NVIDIA GPU"
        if "0" not in value
        else f"1 NVIDIA GPU (sm90), but CUDA_VISIBLE_DEVICES={value!r} hides all of them"
    )


@pytest.mark.parametrize(
    ("value", "order", "archs"),
    [
        (None, None, ("sm90", "sm80")),
        ("1", "PCI_BUS_ID", ("sm80",)),
        ("1,0", "PCI_BUS_ID", ("sm80", "sm90")),
        ("0,7,1", "PCI_BUS_ID", ("sm90",)),
        ("1", None, ("sm90", "sm80")),
        ("GPU-3f9a", "PCI_BUS_ID", ("sm90", "sm80")),
        ("MIG-3f9a", None, ("sm90", "sm80")),
        ("2", "PCI_BUS_ID", None),
    ],
)
def test_visible_gpus_of_several_kinds(
    machine: MachineFactory, nvml: Any, value: str | None, order: str | None, archs: tuple[str, ...] | None
) -> None:
    named = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": order}
    environ = {name: text for name, text in named.items() if text is not None}
    report = detect_cuda(machine(torch=CUDA_BUILD, environ=environ, load_nvml=lambda: nvml(((9, 0), (8, 0)))))
    if archs is None:
        assert not report.present
        assert report.detail == "2 NVIDIA GPUs (sm90, sm80), but CUDA_VISIBLE_DEVICES='2' hides all of them"
    else:
        assert report.present
        assert report.archs == archs


def test_no_driver(machine: MachineFactory) -> None:
    report = detect_cuda(machine(torch=CUDA_BUILD))
    assert not report.present
    assert report.detail == (
        "no NVIDIA driver: its library NVML cannot be loaded (libnvidia-ml.so.1: cannot open shared object file)"
    )


@pytest.mark.parametrize(
    ("call", "shut_down"),
    [("nvmlInit_v2", False), ("nvmlDeviceGetCount_v2", True), ("nvmlSystemGetCudaDriverVersion_v2", True)],
)
def test_a_call_that_fails(machine: MachineFactory, nvml: Any, call: str, shut_down: bool) -> None:
    for status, words in ((9, " (Driver Not Loaded)"), (77, "")):
        library = nvml(((9, 0),), statuses={call: status})
        report = detect_cuda(machine(torch=CUDA_BUILD, load_nvml=lambda library=library: library))
        assert not report.present
        assert report.detail == f"{call} failed with {status}{words}"
        assert ("nvmlShutdown" in library.calls) is shut_down


def test_a_failing_shutdown_keeps_the_answers(machine: MachineFactory, nvml: Any) -> None:
    library = nvml(((9, 0),), statuses={"nvmlShutdown": 9})
    assert detect_cuda(machine(torch=CUDA_BUILD, load_nvml=lambda: library)).archs == ("sm90",)


def test_a_library_without_a_call(machine: MachineFactory, nvml: Any) -> None:
    library = nvml(((9, 0),))
    del library.nvmlDeviceGetCudaComputeCapability
    del library.nvmlErrorString
    report = detect_cuda(machine(torch=CUDA_BUILD, load_nvml=lambda: library))
    assert not report.present
    assert report.detail == "GPU 0: NVML has no nvmlDeviceGetCudaComputeCapability: the NVIDIA driver is too old"
    silent = nvml(((9, 0),), statuses={"nvmlInit_v2": 9})
    del silent.nvmlErrorString
    assert detect_cuda(machine(load_nvml=lambda: silent)).detail == "nvmlInit_v2 failed with 9"


def test_a_lost_gpu_beside_a_good_one(machine: MachineFactory, nvml: Any) -> None:
    report = detect_cuda(machine(torch=CUDA_BUILD, load_nvml=lambda: nvml((15, (9, 0)))))
    assert report.present
    assert report.archs == ("sm90",)
    lost = "GPU 0: nvmlDeviceGetHandleByIndex_v2 failed with 15 (GPU is lost)"
    assert report.detail == f"2 NVIDIA GPUs (unknown architecture, sm90), driver for CUDA 13.0; {lost}"


def test_a_driver_without_gpus(machine: MachineFactory, nvml: Any) -> None:
    report = detect_cuda(machine(torch=CUDA_BUILD, load_nvml=lambda: nvml(())))
    assert not report.present
    assert report.detail == "the NVIDIA driver is loaded, but it reports no GPU"
