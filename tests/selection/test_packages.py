"""Who lacks a backend is told which distribution brings it; the table of those is that of plugins/*."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

import polyattn
from polyattn.contract import packages
from polyattn.errors import BackendUnavailableError
from polyattn.registry.manager import PluginManager, reset_manager

ROOT = Path(__file__).parents[2]


def test_the_table_is_what_the_plugins_of_this_repository_register() -> None:
    found = {}
    for folder in sorted(p.parent.name for p in ROOT.glob("plugins/[!_]*/pyproject.toml")):
        records = importlib.import_module(f"polyattn_{folder}.plugin").polyattn_register_backends()
        found[f"polyattn-{folder}"] = sorted({n for one in records for n in (one.name, *(a.name for a in one.aliases))})
    file = Path(packages.__file__).with_name("packages.json")
    assert json.loads(file.read_text()) == found, "write these into packages.json"


@pytest.fixture
def core_alone() -> None:
    manager = PluginManager(environ={"POLYATTN_PLUGINS": ""})
    manager.load()
    manager.plugins = {name: report for name, report in manager.plugins.items() if name == "core"}
    reset_manager(manager)
    yield
    reset_manager()


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "fa3",
            r"is named 'fa3'.* polyattn-cuda and .*polyattn-xpu would bring it: pip install polyattn-cuda\.",
        ),
        ("aiter", r"polyattn-rocm would bring it: pip install polyattn-rocm\. Usable on cpu: torch_sdpa"),
    ],
)
def test_a_backend_of_a_package_that_is_not_here(core_alone: None, name: str, said: str) -> None:
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(BackendUnavailableError, match=said):
        polyattn.attention(q, q, q, backend=name)


def test_doctor_names_the_packages_that_are_not_here(core_alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    from polyattn.cli import main

    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["packages"]
    assert "aiter" in found["polyattn-rocm"]
    assert main(["doctor"]) == 0
    assert "pip install polyattn-rocm" in capsys.readouterr().out


def test_list_names_them_too(core_alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    from polyattn.cli import main

    assert main(["list"]) == 0
    assert "pip install polyattn-rocm would bring: aiter, " in " ".join(capsys.readouterr().out.split())


def test_a_package_by_its_module_is_here() -> None:
    assert "polyattn-rocm" not in packages.absent_packages(["", "polyattn_rocm.plugin"])
    assert "polyattn-rocm" in packages.absent_packages(["polyattn", "polyattn_xpu.plugin"])
