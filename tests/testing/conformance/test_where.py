"""Where a backend is run: decided without torch, from its name and this machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from polyattn.contract import DeviceReport
from polyattn.errors import BackendUnavailableError
from polyattn.selection.inspection import detect
from polyattn.testing import where
from polyattn.testing.where import place

from .conftest import Acme


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The platforms whose device is here."""
    here = {"cpu"}

    def report(platform: str) -> DeviceReport:
        return DeviceReport(platform in here, f"no {platform} for this test")

    monkeypatch.setattr(where, "detect", report)
    return here


def test_without_an_accelerator_it_is_the_cpu(devices: set[str]) -> None:
    here = place("torch_sdpa")
    assert (here.info.id, here.device, here.missing) == ("torch_sdpa@cpu", "cpu", "")


def test_an_accelerator_comes_before_the_cpu(devices: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    devices.add("rocm")
    monkeypatch.setattr(where, "list_backends", lambda platform: [_status("torch_sdpa", platform)])
    here = place("torch_sdpa")
    assert (here.info.id, here.device) == ("torch_sdpa@rocm", "cuda"), "ROCm's tensors are on `cuda`"
    assert place("torch_sdpa", "cuda:1").device == "cuda:1"
    assert place("torch_sdpa", "cpu").info.id == "torch_sdpa@cpu"
    assert place("torch_sdpa@cpu").info.id == "torch_sdpa@cpu"


def _status(name: str, platform: str) -> object:
    from polyattn.selection.inspection import BackendStatus

    return BackendStatus(name, platform, "", "", "available", "", "")


def test_a_device_that_is_not_here_is_said(devices: set[str]) -> None:
    here = place("torch_sdpa", "cuda")
    assert here.missing == (
        "no device of torch_sdpa is here: cuda (no cuda for this test); rocm (no rocm for this test)"
    )
    assert place("torch_sdpa@xpu").missing == "no device of torch_sdpa is here: xpu (no xpu for this test)"


@pytest.mark.parametrize(
    "words, message",
    [
        (("torch_spda",), r"no backend is named 'torch_spda'\. Did you mean 'torch_sdpa'"),
        (("fa3@cpu",), r"there is no fa3@cpu\. fa3 is registered as: fa3@cuda \(cuda\)"),
        (("fa3", "cpu"), r"there is no fa3 on device cpu\. fa3 is registered as: fa3@cuda \(cuda\)"),
        (("torch_sdpa", "banana"), r"there is no torch_sdpa on device banana\. torch_sdpa is registered as: "),
        (("nsa",), r"nsa is another name of dsa: conformance is that of dsa"),
    ],
)
def test_what_cannot_be_run_anywhere_is_an_error(words: tuple[str, ...], message: str, devices: set[str]) -> None:
    with pytest.raises(BackendUnavailableError, match=message):
        place(*words)


def test_an_alias_of_several_backends_names_them_all(acme: Acme) -> None:
    acme("from polyattn.contract import Alias\nCLAIMS = {'aliases': (Alias('nsa'),)}")
    with pytest.raises(BackendUnavailableError, match="nsa is another name of acme, dsa: conformance is that of"):
        place("nsa")


def test_a_broken_plugin_may_be_what_was_meant(acme: Acme) -> None:
    from polyattn.errors import PluginError

    with pytest.raises(PluginError):
        acme("raise ValueError('no compiler')")
    with pytest.raises(BackendUnavailableError, match=r"no backend is named 'acme'.* acme .*ValueError: no compiler"):
        place("acme")


def test_a_backend_that_lacks_its_packages_is_an_error(acme: Acme) -> None:
    acme(
        behind="""
        @hookimpl
        def polyattn_register_backends():
            needs = (Requirement("acme-kernels-of-nobody"),)
            provider = Provider("acme", ROWS, "acme_kernels.adapter:Acme", needs)
            yield BackendInfo("acme", "cpu", (provider,), summary="")
    """
    )
    with pytest.raises(BackendUnavailableError, match=r"acme@cpu is unavailable: acme-kernels-of-nobody is not inst"):
        place("acme")


def test_it_is_found_out_without_torch_and_the_kit_without_pytest() -> None:
    code = (
        "import sys; from polyattn.testing.where import place; place('torch_sdpa', 'cpu');"
        "assert 'torch' not in sys.modules;"
        "from polyattn.testing import AttentionConformance; assert 'torch' not in sys.modules;"
        "import polyattn.testing; [getattr(polyattn.testing, name) for name in polyattn.testing.__all__];"
        "assert 'pytest' not in sys.modules and 'hypothesis' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_detection_is_the_machine_s() -> None:
    assert where.detect is detect


OTHER = """
@hookimpl
def polyattn_register_backends():
    yield BackendInfo("acme", "cpu", (Provider("p", ROWS, "acme_kernels.adapter:Acme"),), summary="")
    rows = (row(family="varlen", dtype=("float32", "bfloat16"), head_dim=Range(8, 128)),)
    aliases = (Alias("acme", ("varlen",)),)
    yield BackendInfo("packed", "cpu", (Provider("p", rows, "acme_kernels.adapter:Acme"),), summary="", aliases=aliases)
"""


def test_where_a_name_is_another_backend_s_that_one_answers(acme: Acme) -> None:
    """As `fa3` is a backend over caches, and the FlashAttention of that generation elsewhere."""
    from polyattn.testing import Installed, plan

    acme(behind=OTHER)
    for name, families in {"acme": {"paged"}, "packed": {"dense", "paged"}}.items():
        cases = plan(Installed(name), families=["dense", "varlen", "paged"])
        assert {case.request.family for case in cases if case.fields == ("family",)} == families
