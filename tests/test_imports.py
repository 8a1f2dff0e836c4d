"""Importing polyattn, every plugin and the list of backends costs neither torch nor a vendor library.

Each check runs in a fresh interpreter. Stand-ins for every vendor distribution that a record names are put on its
path, installed as far as metadata can tell: code that imports one to find out whether it is there is caught here too.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from polyattn.contract import Requirement

ROOT = Path(__file__).parents[1]
PLUGINS = [f"polyattn_{p.parent.name}.plugin" for p in sorted(ROOT.glob("plugins/[!_]*/pyproject.toml"))]
HEAVY = {"torch", "numpy", "transformers", "diffusers", "triton", "typer", "rich", "yaml"}
LIST_ALL = f"""
import importlib, json, sys
import polyattn
for plugin in {PLUGINS!r}:
    importlib.import_module(plugin)
listed = polyattn.list_backends()
assert listed, "no backend is listed"
print(json.dumps(sorted(sys.modules)))
"""


def requirements() -> Iterator[Requirement]:
    for name in ("polyattn.backends.plugin", *PLUGINS):
        for backend in importlib.import_module(name).polyattn_register_backends():
            for provider in backend.providers:
                yield from provider.requires


def python(code: str, *flags: str, **env: str) -> str:
    """Standard output of a fresh interpreter; its standard error is the failure message."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def admitted(versions: str) -> str:
    """Some version that a specifier admits."""
    specifier = SpecifierSet(versions, prereleases=True)
    bounds = [Version(part.version.removesuffix(".*")) for part in specifier]
    steps = [str(b) for b in bounds] + [f"{b.base_version}.1" for b in bounds] + [f"{b.major + 1}.0" for b in bounds]
    return next(version for version in [*steps, "1.0", "999.0", "0.0.1"] if specifier.contains(version))


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder with a package and metadata for every distribution that a backend needs."""
    for need in requirements():
        top = (need.module or need.distribution.replace("-", "_")).split(".")[0]
        if top in HEAVY or top.startswith("polyattn"):
            continue
        package = tmp_path.joinpath(*(need.module or top).split("."))
        package.mkdir(parents=True, exist_ok=True)
        for folder in (package, *package.parents):
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
        version = admitted(need.versions)
        info = tmp_path / f"{need.distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {need.distribution}\nVersion: {version}\n")
    return tmp_path


def test_listing_backends_imports_no_torch_and_no_vendor_library(stand_ins: Path) -> None:
    vendors = {p.name for p in stand_ins.iterdir() if p.is_dir() and p.suffix != ".dist-info"}
    assert "flash_attn" in vendors, "the stand-ins are built from the plugins' own requirements"
    path = os.pathsep.join([str(stand_ins), *filter(None, [os.environ.get("PYTHONPATH")])])
    loaded = {name.split(".")[0] for name in json.loads(python(LIST_ALL, PYTHONPATH=path))}
    assert not loaded & (vendors | HEAVY)


def test_the_check_notices_an_import(stand_ins: Path) -> None:
    path = os.pathsep.join([str(stand_ins), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = "import flash_attn\n" + LIST_ALL
    assert "flash_attn" in json.loads(python(code, PYTHONPATH=path))


@pytest.mark.parametrize("module", ["polyattn", "polyattn.testing", *PLUGINS])
def test_import_raises_no_warning(module: str) -> None:
    python(f"import {module}", "-W", "error")


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_devices_are_no_error(visible: str) -> None:
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), visible)
    python(LIST_ALL, **hidden)


def test_a_public_module_is_an_attribute_of_the_package() -> None:
    rooms = ["adapters", "contract", "distributed", "integrations", "nn", "serving", "testing", "tuning", "video"]
    python("; ".join(["import polyattn", *(f"assert polyattn.{name}.__name__" for name in rooms)]))


def test_import_time_is_reported_beside_pluggy() -> None:
    script = ROOT / "benchmarks" / "import_time.py"
    done = subprocess.run([sys.executable, script, "--runs", "1", "--json"], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)["milliseconds"]
    assert {"pluggy", "polyattn", "torch"} <= set(figures)
