"""`polyattn doctor`: on this machine, and on machines where something is amiss."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from polyattn import PluginError, tuning
from polyattn.cli import doctor as doctor_module
from polyattn.contract import BackendInfo, DeviceReport, Provider, Requirement, row
from polyattn.integrations.common import hosts
from polyattn.registry.manager import get_manager, reset_manager
from polyattn.selection.inspection import list_backends

from .conftest import VENDORS, Run

KEYS = {
    *("polyattn", "python", "system", "torch_build", "libraries", "platforms", "plugins"),
    *("environment", "unread", "errors", "packages", "problems", "warnings", "backends", "elsewhere", "defects"),
}
Plugin = Callable[[str, str], str]


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_machine_in_order(run: Run) -> None:
    shown = run("doctor", "--json")
    assert (shown.code, shown.err) == (0, "")
    data = shown.data
    assert set(data) == KEYS
    assert data["python"].startswith(platform.python_version())
    assert data["libraries"]["pluggy"] == version("pluggy")
    assert data["torch_build"].startswith(version("torch").partition("+")[0])
    assert {p["name"]: p["state"] for p in data["plugins"]} == dict.fromkeys(("core", *VENDORS), "ready")
    assert all(p["origin"].endswith("plugin.py") for p in data["plugins"])
    devices = {p["name"]: p for p in data["platforms"]}
    assert set(devices) == set(get_manager().platforms)
    assert devices["cpu"]["present"]
    assert not devices["rocm"]["present"]
    assert devices["rocm"]["detail"]
    assert data["problems"] == []


def test_the_text_has_the_same(run: Run) -> None:
    shown = run("doctor")
    assert shown.code == 0
    text = flat(shown.out)
    for part in (
        "Platforms",
        "Plugins",
        "Backends of this machine",
        "no AMD GPU",
        "torch_sdpa@cpu",
        "No problem found.",
    ):
        assert part in text


def test_every_backend_of_this_machine_has_a_reason_and_a_remedy(run: Run) -> None:
    found = {entry["name"]: entry for entry in run("doctor", "--json").data["backends"]}
    assert set(found) == {b.name for b in list_backends("cpu")}
    for entry in found.values():
        assert bool(entry["why"]) == bool(entry["do"]) == (entry["status"] != "available")


REMEDIES = (
    ("cuda", "fa2", "pip install flash-attn"),
    ("rocm", "aiter", "amd-aiter"),
    ("rocm", "wave", "pip install wave-lang; and pip install sglang"),
    ("npu", "ascend", "torch-npu"),
    ("xpu", "fa", "pip install vllm-xpu-kernels; or: build https://github.com/sgl-project/sgl-kernel-xpu"),
    ("xpu", "intel_xpu", "pip install vllm-xpu-kernels; for mla: build https://github.com/sgl-project/sgl-kernel-xpu"),
    ("musa", "fa", "https://github.com/MooreThreads/mate"),
    ("musa", "sage_attn", "wrappers/SageAttention"),
)


def test_every_backend_of_other_devices_has_the_device_and_a_remedy(run: Run) -> None:
    """Of every vendor: what is missing beside the device, and the package that brings it."""
    found = {(entry["platform"], entry["name"]): entry for entry in run("doctor", "--json").data["elsewhere"]}
    here = {status.platform for status in list_backends("cpu")}
    assert set(found) == {key for key in ((n, p)[::-1] for n, p in get_manager().backends) if key[0] not in here}
    for (platform_name, name), entry in found.items():
        assert entry["device"], f"{name}@{platform_name}: why the device is not here"
        assert bool(entry["why"]) == bool(entry["do"]), entry
    impostor = "mate is not installed; the registry has mate, a library of matchers for unittest"
    assert found["musa", "fa"]["why"] == impostor
    for platform_name, name, package in REMEDIES:
        assert package in found[platform_name, name]["do"], found[platform_name, name]


def test_backends_of_other_devices_are_told(run: Run) -> None:
    text = flat(run("doctor").out)
    assert "Backends of other devices" in text
    assert "nothing is missing but the device" in text


def test_variables(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_VALIDATE", "1")
    monkeypatch.setenv("POLYATTN_ATENTION_BACKEND", "fa")
    data = run("doctor", "--json").data
    assert data["environment"]["POLYATTN_VALIDATE"] == "1"
    (sentence,) = data["unread"]
    assert "Did you mean 'POLYATTN_ATTENTION_BACKEND'" in sentence
    text = flat(run("doctor").out)
    assert "POLYATTN_VALIDATE 1" in text
    assert "warning environment POLYATTN_ATENTION_BACKEND is set, but polyattn does not read it" in text


@pytest.mark.parametrize(
    ("text", "state", "reason"),
    [
        ("raise ValueError('no luck')", "broken", "ValueError: no luck"),
        ("import nowhere_to_be_found", "broken", "No module named 'nowhere_to_be_found'"),
        ("POLYATTN_API_VERSION = 99", "incompatible", "speaks plugin API 99"),
        ("def polyattn_register_backend(): ...", "broken", "is no hook of polyattn"),
    ],
)
@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_plugin_that_cannot_be_used(
    run: Run, plugin: Plugin, monkeypatch: pytest.MonkeyPatch, text: str, state: str, reason: str, strict: str
) -> None:
    monkeypatch.setenv("POLYATTN_STRICT", strict)
    plugin("acme", text)
    shown = run("doctor", "--json")
    assert shown.code == 4
    (found,) = [p for p in shown.data["plugins"] if p["name"] == "acme_plugin"]
    assert found["state"] == state
    assert reason in found["reason"]
    assert "traceback" not in found
    assert {p["state"] for p in shown.data["plugins"] if p["name"] != "acme_plugin"} == {"ready"}
    shown = run("doctor")
    assert shown.code == 4
    assert reason in flat(shown.out)
    assert "plugin acme_plugin cannot be used: repair or uninstall it, or set POLYATTN_DISABLE" in flat(shown.out)


def test_verbose_has_the_traceback(run: Run, plugin: Plugin) -> None:
    plugin("acme", "raise ValueError('no luck')")
    shown = run("doctor", "--verbose")
    assert shown.code == 4
    assert "Traceback (most recent call last)" in shown.out
    assert "Traceback" not in run("doctor").out
    (found,) = [p for p in run("doctor", "-v", "--json").data["plugins"] if p["name"] == "acme_plugin"]
    assert found["traceback"].endswith("ValueError: no luck\n")


def test_a_plugin_that_was_left_out_is_no_problem(run: Run, plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_DISABLE", "acme_plugin")
    plugin("acme", "raise ValueError('no luck')")
    shown = run("doctor", "--json")
    assert shown.code == 0
    (found,) = [p for p in shown.data["plugins"] if p["name"] == "acme_plugin"]
    assert (found["state"], found["origin"]) == ("not allowed", "")
    assert "left out by POLYATTN_DISABLE" in flat(run("doctor").out)


NOT_INSTALLED = """
from polyattn.contract import hookimpl
from polyattn.contract import BackendInfo, Provider, Range, Requirement, row

def provider(name, distribution, hint, family="dense", also=()):
    rows = (row(family=family, dtype="float32", head_dim=Range(1)),)
    return Provider(name, rows, "nowhere:Adapter", (Requirement(distribution, hint=hint), *also))

@hookimpl
def polyattn_register_backends():
    one = provider("hard", "acme-hard", "build it from source")
    two = provider("easy", "acme-easy", "pip install acme-easy")
    caches = provider("caches", "acme-caches", "ask for it", ("dense", "paged"))
    both = provider("both", "acme-easy", "pip install acme-easy", also=(Requirement("torch", "<1"),))
    yield BackendInfo("acme", "cpu", (one, two, caches), summary="Acme")
    yield BackendInfo("acme_only", "cpu", (one,), summary="Acme's other one")
    yield BackendInfo("acme_both", "cpu", (both,), summary="Acme's third one")
"""


def test_what_is_not_installed_has_the_easiest_remedy_first(run: Run, plugin: Plugin) -> None:
    plugin("acme", NOT_INSTALLED)
    found = {entry["name"]: entry for entry in run("doctor", "--json").data["backends"]}
    assert found["acme"]["why"] == "acme-easy is not installed"
    assert found["acme"]["do"] == "pip install acme-easy; or: build it from source; for paged: ask for it"
    assert found["acme_only"]["do"] == "build it from source"
    assert found["acme_both"]["why"].startswith("acme-easy is not installed; torch ")
    assert found["acme_both"]["why"].endswith(" is installed, <1 is needed")
    assert found["acme_both"]["do"] == "pip install acme-easy; and pip install torch<1"
    text = flat(run("doctor").out)
    assert "acme-easy is not installed" in text


def test_what_is_left_out_counts_as_not_installed(run: Run, plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    def why() -> tuple[str, str]:
        (entry,) = (entry for entry in run("doctor", "--json").data["backends"] if entry["name"] == "acme")
        return entry.get("why", ""), entry.get("do", "")

    plugin("acme", NOT_INSTALLED.replace("acme-easy", "pluggy"))
    assert "pluggy" not in why()[0]
    monkeypatch.setenv("POLYATTN_WITHOUT", "nothing, Pluggy")
    reset_manager()
    assert why()[0] == "pluggy is left out by POLYATTN_WITHOUT"
    assert why()[1].startswith("take pluggy out of it; or: build it from source")


@pytest.mark.parametrize("left", ["acme-easy", "Pluggy"])
def test_either_name_of_what_is_needed_leaves_it_out(
    run: Run, plugin: Plugin, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    plugin("acme", NOT_INSTALLED.replace("hint=hint)", 'hint=hint, also=("pluggy",))'))
    monkeypatch.setenv("POLYATTN_WITHOUT", left)
    (entry,) = (entry for entry in run("doctor", "--json").data["backends"] if entry["name"] == "acme_both")
    assert entry["why"].startswith(f"{left.lower()} is left out by POLYATTN_WITHOUT; torch ")
    assert entry["do"] == f"take {left.lower()} out of it; and pip install torch<1"


DETECTION_RAISES = """
from polyattn.contract import hookimpl
from polyattn.contract import PlatformInfo

def detect():
    raise RuntimeError("driver on fire")

@hookimpl
def polyattn_register_platforms():
    return [PlatformInfo("acme", device_type="acme", detect="acme_plugin:detect")]
"""


def test_a_platform_whose_detection_raises_is_a_problem(run: Run, plugin: Plugin) -> None:
    plugin("acme", DETECTION_RAISES)
    shown = run("doctor", "--json")
    assert shown.code == 0
    assert shown.data["problems"] == ["acme: its detection failed: RuntimeError: driver on fire"]
    (device,) = [p for p in shown.data["platforms"] if p["name"] == "acme"]
    assert not device["present"]
    assert "driver on fire" in device["detail"]


def test_a_store_that_cannot_be_used_is_a_problem(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "store.sqlite3").write_bytes(b"SQLite format 3\0" + bytes(100))
    monkeypatch.setenv("POLYATTN_TUNING_STORE", str(tmp_path / "store.sqlite3"))
    tuning.reload()
    try:
        (problem,) = run("doctor", "--json").data["problems"]
        assert problem.startswith(f"the tuning store {tmp_path / 'store.sqlite3'} cannot be read")
        monkeypatch.setenv("POLYATTN_TUNING", "off")
        assert run("doctor", "--json").data["problems"] == []
    finally:
        monkeypatch.undo()
        tuning.reload()


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("POLYATTN_STRICT", "maybe", "POLYATTN_STRICT='maybe' is not a switch"),
        ("POLYATTN_DISABLE", "acme,core", "POLYATTN_DISABLE='acme,core': core cannot be left out"),
        ("POLYATTN_VALIDATE", "maybe", "POLYATTN_VALIDATE='maybe' is not a switch"),
        ("POLYATTN_REFERENCE_MEMORY_GB", "lots", "POLYATTN_REFERENCE_MEMORY_GB='lots' is not a positive number"),
        ("POLYATTN_TUNING", "on", "POLYATTN_TUNING='on' is not known. Allowed: use, off, online"),
        ("POLYATTN_ATTENTION_BACKEND", "torch_spda", "is not a known backend. Did you mean 'torch_sdpa'"),
        ("POLYATTN_CONFIG", "/nowhere/polyattn.yaml", "/nowhere/polyattn.yaml"),
    ],
)
def test_configuration_that_is_wrong_is_a_problem(
    run: Run, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(variable, value)
    reset_manager()
    shown = run("doctor", "--json")
    assert shown.code == 0
    assert len([found for found in shown.data["problems"] if problem in found]) == 1
    assert "problem " in run("doctor").out
    monkeypatch.undo()
    reset_manager()


def test_a_device_that_is_missing_sends_to_the_platforms() -> None:
    provider = Provider("p", (row(family="dense", dtype="float32", head_dim=64),), "m:A", (Requirement("torch"),))
    info = BackendInfo("x", "cuda", (provider,), summary="s")
    status: Any = type("Status", (), {"status": "unavailable", "reasons": ("no cuda device: none",), "package": "p"})
    assert doctor_module._diagnosis(info, status) == ("no cuda device: none", "see the platform above")


def test_an_accelerator_that_is_found_comes_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {"cuda": DeviceReport(True, "1 NVIDIA GPU (sm90)", ("sm90",), (12, 8))}
    absent, cpu = DeviceReport(False, "none"), DeviceReport(True, "a CPU")
    find = lambda name: reports.get(name, cpu if name == "cpu" else absent)  # noqa: E731
    monkeypatch.setattr("polyattn.cli.doctor.detect", find)
    monkeypatch.setattr("polyattn.selection.listing.detect", find)
    data = run("doctor", "--json").data
    assert {entry["platform"] for entry in data["backends"]} == {"cuda", "cpu"}
    assert "found 1 NVIDIA GPU (sm90)" in flat(run("doctor").out)


@pytest.mark.parametrize("features", [(), ("amx",)])
def test_what_the_machine_itself_lacks(features: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    absent, cpu = DeviceReport(False, "none"), DeviceReport(True, "a CPU", features=features)
    monkeypatch.setattr("polyattn.cli.doctor.detect", lambda name: cpu if name == "cpu" else absent)
    found = {entry["name"]: entry["why"] for entry in run("doctor", "--json").data["backends"]}
    said = "this CPU has no AMX, which the kernels need: torch_native serves in its place"
    assert "sgl-kernel-cpu is not installed" in found["intel_amx"]
    assert (said in found["intel_amx"]) is (not features)


def test_known_defects_of_libraries_that_are_here_are_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    defects = run("doctor", "--json").data["defects"]
    assert all("cuda" not in name for one in defects for name in one["backends"]), "of devices that are here alone"
    real = doctor_module.detect
    found = DeviceReport(True, "a planted device", archs=("sm90",))
    monkeypatch.setattr(doctor_module, "detect", lambda name: found if name == "cuda" else real(name))
    data = run("doctor", "--json").data
    (mended,) = [one for one in data["defects"] if one["library"] == "cuDNN" and "torch_sdpa@cuda" in one["backends"]]
    assert "NaN" in mended["what"]
    assert mended["done"].startswith("mended: ")
    assert "196678" in mended["source"]
    assert not any(one["library"] == "vllm" for one in data["defects"]), "it is not installed"
    assert "Known defects of libraries that are installed here" in flat(run("doctor").out)


def test_an_evidence_file_that_is_damaged_is_a_problem(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> None:
        raise PluginError("x@cpu.json is not an evidence file")

    monkeypatch.setattr(doctor_module, "list_backends", damaged)
    shown = run("doctor", "--json")
    assert (shown.code, shown.data["backends"]) == (0, [])
    assert shown.data["problems"] == ["x@cpu.json is not an evidence file"]


def test_a_plugin_that_imports_what_it_must_not_is_a_warning(run: Run, plugin: Plugin) -> None:
    """torch, or a library that its providers need; a plugin that does without when there is none is no better."""
    need = 'Requirement("acme-sdk", module="acme_sdk.kernels")'
    text = f"""
from polyattn.contract import hookimpl
from polyattn.contract import *

try:
    import acme_sdk
except ImportError:
    acme_sdk = None
import torch.nn


@hookimpl
def polyattn_register_backends():
    provider = Provider("acme", (row(family="dense", dtype="float32", head_dim=8),), "acme:Acme", ({need},))
    yield BackendInfo("acme", "cpu", (provider,), summary="Acme's")
"""
    plugin("acme", text)
    (text,) = run("doctor", "--json").data["warnings"]
    assert text == (
        "plugin acme_plugin (module acme_plugin) imports acme_sdk, torch when it is loaded, so that every program "
        "which lists backends waits for it: import it in the adapter, which is loaded at the first call"
    )


def test_an_alias_that_is_the_name_of_another_is_a_warning(run: Run, plugin: Plugin) -> None:
    text = """
from polyattn.contract import hookimpl
from polyattn.contract import *


@hookimpl
def polyattn_register_backends():
    provider = Provider("acme", (row(family="dense", dtype="float32", head_dim=8),), "acme:Acme")
    yield BackendInfo("acme", "cpu", (provider,), summary="Acme's", aliases=(Alias("torch_sdpa"),))
"""
    plugin("acme", text)
    (text,) = run("doctor", "--json").data["warnings"]
    assert text == (
        "plugin acme_plugin: the alias 'torch_sdpa' of acme@cpu means nothing, because torch_sdpa@cpu of plugin core "
        "has it as its name. Rename the alias"
    )


def test_a_host_that_is_too_old(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    own = hosts.distribution_version
    monkeypatch.setattr(hosts, "distribution_version", lambda name: "5.3.0" if name == "transformers" else own(name))
    (problem,) = run("doctor", "--json").data["problems"]
    assert problem.startswith("transformers 5.3.0 is installed, 5.4 or newer is needed")
    assert "pip install -U transformers" in problem
    monkeypatch.setattr(hosts, "distribution_version", lambda name: None)
    assert hosts.outdated("transformers") == ""
