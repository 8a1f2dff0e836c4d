"""Detection on the machine that runs the tests, in a fresh process: lazy, harmless, and of torch's opinion."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyattn.contract import DeviceReport
from polyattn.registry.platforms import CORE_PLATFORMS, Machine, TorchBuild, detect_cpu, torch_build

PROBE = """
import glob, importlib, json, os, sys
from polyattn.registry.platforms import CORE_PLATFORMS

def libraries():
    try:
        with open("/proc/self/maps") as maps:
            return {line.split()[-1] for line in maps if ".so" in line}
    except OSError:
        return set()

found, before = {}, libraries()
for info in CORE_PLATFORMS:
    module, function = info.detect.split(":")
    report = getattr(importlib.import_module(module), function)()
    found[info.name] = [report.present, report.detail, list(report.archs), list(report.toolkit)]
found["libraries"] = sorted(libraries() - before)
found["devices"] = [os.readlink(f) for f in glob.glob("/proc/self/fd/*") if os.path.exists(f)]
found["modules"] = sorted(sys.modules)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, list[object]]:
    source = Path(str(importlib.import_module("polyattn.registry.platforms").__file__)).parents[3]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_nothing_heavy_is_imported(probe: dict[str, list[object]]) -> None:
    heavy = {"torch", "torch_npu", "torch_musa", "numpy", "yaml"}
    assert heavy.isdisjoint(probe["modules"])


def test_no_device_is_initialised(probe: dict[str, list[object]]) -> None:
    """NVML is a library of its own (newer ones map libcuda beside them); the CUDA, HIP and Level Zero runtimes would
    initialise a device, and a CUDA context opens nvidia-uvm."""
    assert "libnvidia-ml" in str(probe["libraries"]) or not probe["cuda"][0]
    for runtime in ("libcudart", "libamdhip64", "libze_loader"):
        assert runtime not in str(probe["libraries"])
    assert "nvidia-uvm" not in str(probe["devices"])


def test_torch_agrees(probe: dict[str, list[object]]) -> None:
    import torch

    assert torch_build() == TorchBuild(
        torch.version.__version__,
        torch.version.cuda or "",
        torch.version.hip or "",
        torch.version.xpu or "",
    )
    assert torch.cuda.is_available() is (probe["cuda"][0] or probe["rocm"][0])
    assert torch.xpu.is_available() is probe["xpu"][0]
    assert torch.backends.mps.is_available() is probe["mps"][0]
    if probe["cuda"][0]:
        capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        assert {f"sm{major}{minor}" for major, minor in capabilities} <= set(probe["cuda"][2])  # type: ignore[call-overload]
        assert tuple(probe["cuda"][3]) == tuple(map(int, torch.version.cuda.split(".")[:2]))  # type: ignore[arg-type]


def test_distributions_are_found_by_their_metadata() -> None:
    assert Machine().installed("pytest") == pytest.__version__
    assert Machine().installed("polyattn-no-such-distribution") == ""


def test_the_cpu_is_present_and_torch_agrees_on_its_features() -> None:
    import torch

    report = detect_cpu()
    assert report.present
    if sys.platform == "linux":
        # torch knows whether it may use AMX here, so it can only know less than /proc/cpuinfo.
        assert "amx" in report.features or not torch.cpu._is_amx_tile_supported()
        assert "avx512" in report.features or "avx512" not in torch.backends.cpu.get_cpu_capability().lower()


def test_the_records_of_core_name_their_functions() -> None:
    assert [info.name for info in CORE_PLATFORMS] == ["cuda", "rocm", "xpu", "musa", "npu", "mps", "cpu"]
    by_name = {info.name: info for info in CORE_PLATFORMS}
    assert {name: info.device_type for name, info in by_name.items()} == {
        **{name: name for name in by_name},
        "rocm": "cuda",
    }
    assert {name: info.plugin for name, info in by_name.items() if info.plugin} == {
        "cuda": "cuda",
        "rocm": "rocm",
        "npu": "ascend",
        "xpu": "xpu",
        "musa": "musa",
    }
    assert by_name["mps"].fallback == "torch_sdpa"
    assert by_name["mps"].fallback_why == "on MPS that name stands for torch_sdpa"
    for name, info in by_name.items():
        assert info.detect == f"polyattn.registry.platforms:detect_{name}"
        module, function = info.detect.split(":")
        assert isinstance(getattr(importlib.import_module(module), function)(), DeviceReport)
