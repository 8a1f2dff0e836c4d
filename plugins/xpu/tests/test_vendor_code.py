"""The adapters over the vendors' own Python code on the CPU, where a wheel of it is at hand.

vllm-xpu-kernels computes with a reference in PyTorch where a kernel is not compiled for a configuration: here none is.
Intel Extension for PyTorch does not import beside another torch than its own, but the one file that has its packed
attention is plain PyTorch. Nothing is installed:

    pip download --no-deps -d wheels vllm-xpu-kernels==0.1.16.2 intel-extension-for-pytorch==2.8.0
    for wheel in wheels/*.whl; do unzip -q -d vendor "$wheel" '*.py'; done
    PYTHONPATH=vendor pytest plugins/xpu/tests/test_vendor_code.py
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from polyattn import adapters
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated

FLASH = Emulated("fa", "vllm-xpu-kernels", "xpu:bmg")
PAGED = Emulated("intel_xpu", "vllm-xpu-kernels", "xpu:bmg")
IPEX = Emulated("ipex", "intel-extension-for-pytorch", "cpu")


def _computed(case: Case) -> bool:
    """Whether the reference means what the kernels mean: it knows no window that ends at a row's own key. Sinks are in
    the queries' dtype."""
    return 0 not in case.request.window and (case.sink == "usual" or not case.request.sinks)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("vllm_xpu_kernels.flash_attn_interface", reason="no wheel of vllm-xpu-kernels")

    def varlen_fwd(*_: Any) -> None:
        raise RuntimeError("varlen_fwd is not compiled for the CPU")

    monkeypatch.setattr(torch.ops, "_vllm_fa2_C", SimpleNamespace(varlen_fwd=varlen_fwd), raising=False)
    # Its short cut for verify has no reference.
    monkeypatch.setattr(library, "_SPEC_DECODE_MAX_QLEN", 0)
    monkeypatch.setattr(library, "_warned_missing_configs", {"varlen_fwd is not compiled for the CPU"})


@pytest.mark.parametrize("target", [FLASH, PAGED], ids=["fa", "intel_xpu"])
def test_vllm_xpu_kernels(target: Emulated, vllm: None) -> None:
    tried = [case for case in target.cases(per_row=8, dtypes=("bfloat16", "float16")) if _computed(case)]
    assert len(tried) > 20
    assert target.caught(tried) == []


@pytest.fixture
def ipex(monkeypatch: pytest.MonkeyPatch) -> type:
    """`VarlenAttention` of the CPU, from its own file: the packages above it are not executed."""
    spec = importlib.util.find_spec("intel_extension_for_pytorch")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("intel-extension-for-pytorch is not on the path: see this file's docstring")
    root = Path(spec.submodule_search_locations[0])
    parts = (
        "",
        ".transformers",
        ".transformers.models",
        ".transformers.models.cpu",
        ".transformers.models.cpu.fusions",
    )
    for part in (*parts, ".transformers.models.reference", ".transformers.models.reference.fusions"):
        package = ModuleType(f"intel_extension_for_pytorch{part}")
        package.__path__ = [str(root.joinpath(*part.split(".")))]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    found = importlib.import_module("intel_extension_for_pytorch.transformers.models.cpu.fusions.mha_fusion")
    attention: type = found._IPEXVarlenScaledDotProductCPU
    return attention


def test_intel_extension_for_pytorch(ipex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "load", lambda *_: ipex.apply_function)
    tried = IPEX.cases(per_row=8, dtypes=("float32", "bfloat16"))
    assert len(tried) > 20
    assert IPEX.caught(tried) == []
