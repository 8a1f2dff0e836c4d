"""ROCm, XPU, NPU, MUSA, MPS and CPU detection on fake trees."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyattn.registry.platforms import (
    Machine,
    TorchBuild,
    detect_cpu,
    detect_mps,
    detect_musa,
    detect_npu,
    detect_rocm,
    detect_xpu,
    gfx_name,
)

MachineFactory = Callable[..., Machine]
Plant = Callable[..., Path]
HIP_BUILD = TorchBuild("2.13.0+rocm7.1", hip="7.1.25424-4179531dcd")
XPU_BUILD = TorchBuild("2.13.0+xpu", xpu="20250302")


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90402, "gfx942"),
        (90010, "gfx90a"),
        (90500, "gfx950"),
        (90008, "gfx908"),
        (100300, "gfx1030"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_gfx_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


@pytest.fixture
def amd(plant: Plant) -> Plant:
    """A CPU node and the given GPU nodes, and /dev/kfd."""

    def put(*versions: int, kfd: bool = True) -> None:
        for number, version in enumerate((0, *versions)):
            text = f"cpu_cores_count 0\nsimd_count 4\ngfx_target_version {version}\nvendor_id 4098\n"
            plant(f"sys/class/kfd/kfd/topology/nodes/{number}/properties", text)
        if kfd:
            plant("dev/kfd")

    return put  # type: ignore[return-value]


def test_rocm(machine: MachineFactory, amd: Any) -> None:
    amd(90402, 90402)
    report = detect_rocm(machine(torch=HIP_BUILD))
    assert report.present
    assert report.archs == ("gfx942",)
    assert report.toolkit == (7, 1)
    assert report.detail == "2 AMD GPUs (gfx942), ROCm 7.1"
    assert report.torch_build == "2.13.0+rocm7.1, hip 7.1.25424-4179531dcd"


def test_rocm_without_gpus(machine: MachineFactory, amd: Any) -> None:
    said = "no AMD GPU: /sys/class/kfd lists none (the amdgpu kernel driver provides it)"
    assert detect_rocm(machine(torch=HIP_BUILD)).detail == said
    amd()
    report = detect_rocm(machine(torch=HIP_BUILD))
    assert (report.present, report.detail) == (False, said)


def test_rocm_without_a_rocm_build(machine: MachineFactory, amd: Any, plant: Plant) -> None:
    amd(90010)
    plant("opt/rocm/.info/version", "6.4.1-83\n")
    report = detect_rocm(machine())
    assert not report.present
    assert report.archs == ("gfx90a",)
    assert report.toolkit == (6, 4)
    assert report.detail == (
        "found 1 AMD GPU (gfx90a), but torch 2.13.0+cpu is not built for ROCm; "
        "install a ROCm build of PyTorch (pytorch.org/get-started/locally)"
    )


def test_rocm_in_a_container_without_the_device(machine: MachineFactory, amd: Any) -> None:
    amd(90402, kfd=False)
    report = detect_rocm(machine(torch=HIP_BUILD))
    assert not report.present
    assert report.detail == (
        "1 AMD GPU (gfx942), but /dev/kfd is missing; in a container add --device=/dev/kfd --device=/dev/dri"
    )


def test_rocm_without_permission(machine: MachineFactory, amd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    amd(90402)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    report = detect_rocm(machine(torch=HIP_BUILD))
    assert not report.present
    assert report.detail == (
        "1 AMD GPU (gfx942), but this user may not open /dev/kfd; add the user to the group render"
    )


@pytest.mark.parametrize(
    ("environ", "archs"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, ("gfx90a",)),
        ({"ROCR_VISIBLE_DEVICES": "2,1"}, ("gfx1100", "gfx90a")),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ("gfx1100",)),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ("gfx942",)),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, ("gfx90a",)),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1234"}, ("gfx942", "gfx90a", "gfx1100")),
        ({"HIP_VISIBLE_DEVICES": ""}, "HIP_VISIBLE_DEVICES=''"),
        ({"HIP_VISIBLE_DEVICES": "-1"}, "HIP_VISIBLE_DEVICES='-1'"),
        ({"ROCR_VISIBLE_DEVICES": "x"}, "ROCR_VISIBLE_DEVICES='x'"),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, "HIP_VISIBLE_DEVICES='1'"),
    ],
)
def test_visible_rocm_gpus(
    machine: MachineFactory, amd: Any, environ: dict[str, str], archs: tuple[str, ...] | str
) -> None:
    amd(90402, 90010, 110000)
    report = detect_rocm(machine(torch=HIP_BUILD, environ=environ))
    if isinstance(archs, str):
        assert not report.present
        assert report.detail == f"3 AMD GPUs (gfx942, gfx90a, gfx1100), but {archs} hides all of them"
    else:
        assert report.present
        assert report.archs == archs


def test_rocm_orders_nodes_by_number(machine: MachineFactory, amd: Any) -> None:
    amd(*[90402] * 9, 90010)
    assert detect_rocm(machine(torch=HIP_BUILD, environ={"HIP_VISIBLE_DEVICES": "9"})).archs == ("gfx90a",)


@pytest.fixture
def intel(plant: Plant) -> Any:
    def put(card: int, device: str, vendor: str = "0x8086", render: bool = True) -> None:
        base = f"sys/class/drm/card{card}/device"
        plant(f"{base}/vendor", f"{vendor}\n")
        plant(f"{base}/device", f"{device}\n")
        if render:
            plant(f"{base}/drm/renderD{128 + card}/dev")
        # A connector shows the same device again.
        plant(f"sys/class/drm/card{card}-DP-1/device/vendor", f"{vendor}\n")
        plant(f"sys/class/drm/card{card}-DP-1/device/drm/renderD{128 + card}/dev")

    return put


@pytest.mark.parametrize(
    ("device", "archs", "features"),
    [
        ("0x0bd5", ("pvc",), ("xmx",)),
        ("0x0b69", ("pvc",), ("xmx",)),
        ("0xe20b", ("bmg",), ("xmx",)),
        ("0xE211", ("bmg",), ("xmx",)),
        ("0x9a49", (), ()),
        ("what", (), ()),
    ],
)
def test_xpu(
    machine: MachineFactory, intel: Any, device: str, archs: tuple[str, ...], features: tuple[str, ...]
) -> None:
    intel(0, device)
    report = detect_xpu(machine(torch=XPU_BUILD))
    assert report.present
    assert (report.archs, report.features, report.toolkit) == (archs, features, (2025, 3, 2))
    assert report.detail == f"1 Intel GPU ({archs[0] if archs else 'unknown architecture'})"


def test_xpu_counts_only_intel_render_nodes(machine: MachineFactory, intel: Any) -> None:
    intel(0, "0x0bd5")
    intel(1, "0xe20b", render=False)
    (machine().root / "sys/class/drm/card1-DP-1/device/drm/renderD129/dev").unlink()
    intel(2, "0xe20b", vendor="0x10de")
    report = detect_xpu(machine(torch=XPU_BUILD))
    assert report.archs == ("pvc",)
    assert report.detail == "1 Intel GPU (pvc)"


def test_xpu_without_gpu_or_build(machine: MachineFactory, intel: Any) -> None:
    report = detect_xpu(machine(torch=XPU_BUILD))
    assert not report.present
    assert report.detail == "no Intel GPU: /sys/class/drm has no render node of vendor 0x8086"
    intel(0, "0x0bd5")
    report = detect_xpu(machine())
    assert not report.present
    assert report.archs == ("pvc",)
    assert report.detail == (
        "found 1 Intel GPU (pvc), but torch 2.13.0+cpu is not built for XPU; "
        "install an XPU build of PyTorch (pytorch.org/get-started/locally)"
    )


def test_xpu_version_that_says_nothing(machine: MachineFactory, intel: Any) -> None:
    intel(0, "0x0bd5")
    report = detect_xpu(machine(torch=TorchBuild("2.14.0+xpu", xpu="2.14.0+xpu")))
    assert report.present
    assert report.toolkit == ()


def ascend(plant: Plant, devices: int = 2, pci: str = "0xd802") -> None:
    for number in range(devices):
        plant(f"dev/davinci{number}")
        plant(f"sys/bus/pci/devices/0000:0{number}:00.0/vendor", "0x19e5\n")
        plant(f"sys/bus/pci/devices/0000:0{number}:00.0/device", f"{pci}\n")
    plant("dev/davinci_manager")
    # A network card of the same vendor.
    plant("sys/bus/pci/devices/0000:0a:00.0/vendor", "0x19e5\n")
    plant("sys/bus/pci/devices/0000:0a:00.0/device", "0x0222\n")


@pytest.mark.parametrize(
    ("pci", "arch"),
    [
        ("0xd802", "ascend910b"),
        ("0xd803", "ascend910_93"),
        ("0xd801", "ascend910"),
        ("0xd500", "ascend310p"),
        ("0xd100", "ascend310"),
        ("0xffff", ""),
    ],
)
def test_npu(machine: MachineFactory, plant: Plant, pci: str, arch: str) -> None:
    ascend(plant, pci=pci)
    info = "package_name=Ascend-cann-toolkit\nversion=8.1.RC1\narch=aarch64\n"
    plant("usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info", info)
    report = detect_npu(machine({"torch-npu": "2.11.0"}))
    assert report.present
    assert report.archs == ((arch,) if arch else ())
    assert report.toolkit == (8, 1)
    assert report.detail == f"2 Ascend NPUs ({arch or 'unknown architecture'}), torch-npu 2.11.0, CANN 8.1"


def test_cann_is_looked_for_where_it_says(machine: MachineFactory, plant: Plant, tmp_path: Path) -> None:
    ascend(plant)
    plant("usr/local/Ascend/cann/x86_64-linux/ascend_toolkit_install.info", "version=8.5.0\n")
    assert detect_npu(machine({"torch-npu": "2"})).toolkit == (8, 5, 0)
    plant("home/x86_64-linux/ascend_toolkit_install.info", "version=9.0.0\n")
    environ = {"ASCEND_TOOLKIT_HOME": str(tmp_path / "home")}
    assert detect_npu(machine({"torch-npu": "2"}, environ=environ)).toolkit == (9, 0, 0)


def test_npu_without(machine: MachineFactory, plant: Plant) -> None:
    plant("dev/davinci_manager")
    report = detect_npu(machine({"torch-npu": "2"}))
    assert not report.present
    assert report.detail == "no Ascend NPU: there is no /dev/davinci0 (in a container add --device=/dev/davinci0)"
    ascend(plant)
    report = detect_npu(machine())
    assert not report.present
    assert report.detail == (
        "2 Ascend NPUs (ascend910b), but torch-npu is not installed; pip install torch-npu of the version of your torch"
    )
    report = detect_npu(machine({"torch-npu": "2"}, torch=TorchBuild()))
    assert not report.present
    assert report.detail == ("found 2 Ascend NPUs (ascend910b), but PyTorch is not installed; pip install torch")
    assert detect_npu(machine({"torch-npu": "2"})).detail.endswith("torch-npu 2, CANN not found")


@pytest.mark.parametrize(
    ("nodes", "count"),
    [
        (("mtgpu.0", "mtgpu.1"), "2 Moore Threads GPUs"),
        (("mtgpu0", "mtgpu_ctl"), "1 Moore Threads GPU"),
        (("mtgpu",), "1 Moore Threads GPU"),
    ],
)
def test_musa(machine: MachineFactory, plant: Plant, nodes: tuple[str, ...], count: str) -> None:
    for node in nodes:
        plant(f"dev/{node}")
    report = detect_musa(machine({"torch-musa": "2.7.1"}))
    assert report.present
    assert report.archs == ()
    assert report.detail == f"{count}, torch-musa 2.7.1"


def test_musa_without(machine: MachineFactory, plant: Plant) -> None:
    report = detect_musa(machine({"torch-musa": "2.7.1"}))
    assert (report.present, report.detail) == (False, "no Moore Threads GPU: there is no /dev/mtgpu*")
    plant("dev/mtgpu.0")
    report = detect_musa(machine())
    assert not report.present
    assert report.detail == (
        "1 Moore Threads GPU, but torch-musa is not installed; install it from Moore Threads (it is not on PyPI)"
    )
    report = detect_musa(machine({"torch-musa": "2"}, torch=TorchBuild()))
    assert not report.present
    assert report.detail == (
        "found 1 Moore Threads GPU, but PyTorch is not installed; install the torch that torch-musa names"
    )
    report = detect_musa(machine({"torch-musa": "2"}, environ={"MUSA_VISIBLE_DEVICES": ""}))
    assert not report.present
    assert report.detail == "1 Moore Threads GPU, but MUSA_VISIBLE_DEVICES='' hides all of them"


def test_mps(machine: MachineFactory) -> None:
    report = detect_mps(machine(system="darwin", machine="arm64", torch=TorchBuild("2.13.0")))
    assert (report.present, report.detail, report.torch_build) == (True, "Apple silicon", "2.13.0")
    for fields, detail in (
        ({"system": "linux"}, "no Apple GPU: this is linux, not macOS"),
        (
            {"system": "darwin", "machine": "x86_64"},
            "no Apple GPU for PyTorch: this Mac is x86_64, not Apple silicon (arm64)",
        ),
        (
            {"system": "darwin", "machine": "arm64", "torch": TorchBuild()},
            "found an Apple silicon GPU, but PyTorch is not installed; pip install torch",
        ),
    ):
        report = detect_mps(machine(**fields))
        assert (report.present, report.detail) == (False, detail)


@pytest.mark.parametrize(
    ("cpuinfo", "features", "detail"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f amx_bf16 amx_tile amx_int8\n", ("amx", "avx512"), "amx+avx512"),
        ("flags : fpu avx2 amx_tile\n", (), "none of amx, avx512, sve"),
        ("Features\t: fp asimd sve i8mm\n", ("sve",), "sve"),
        ("flags\t: notavx512f\n", (), "none of amx, avx512, sve"),
        ("processor : 0\n", (), "features unknown: /proc/cpuinfo lists none"),
        (None, (), "features unknown: /proc/cpuinfo lists none"),
    ],
)
def test_cpu(
    machine: MachineFactory, plant: Plant, cpuinfo: str | None, features: tuple[str, ...], detail: str
) -> None:
    if cpuinfo is not None:
        plant("proc/cpuinfo", cpuinfo)
    report = detect_cpu(machine())
    assert report.present
    assert report.features == features
    assert report.detail == f"x86_64 CPU, {detail}"
    assert report.torch_build == "2.13.0+cpu"


def test_unreadable_files_are_reasons_not_errors(machine: MachineFactory, plant: Plant) -> None:
    for folder in (
        "sys/class/kfd/kfd/topology/nodes/1/properties/x",
        "sys/class/drm/card0/device/vendor/x",
        "proc/cpuinfo/x",
    ):
        plant(folder)
    for detect in (detect_rocm, detect_xpu):
        assert not detect(machine()).present
    assert "features unknown" in detect_cpu(machine()).detail


def test_folders_that_cannot_be_listed(machine: MachineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Path, pattern: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "glob", broken)
    for detect in (detect_rocm, detect_xpu, detect_npu, detect_musa):
        assert not detect(machine()).present
