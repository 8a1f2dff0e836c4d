"""The torch build is read as text: from a tree on the import path, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from polyattn.registry.platforms import TorchBuild, torch_build

VERSION = """
from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = {version!r}
debug = False
cuda: Optional[str] = {cuda!r}
git_version = 'cf30153c'
hip: Optional[str] = {hip!r}
xpu: Optional[str] = {xpu!r}
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Puts a torch on the import path that cannot be imported, and hides the real one."""

    def put(version: str | None) -> None:
        package = tmp_path / "torch"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
        if version is not None:
            (package / "version.py").write_text(version)
        importlib.invalidate_caches()

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return put


@pytest.mark.parametrize(
    ("fields", "build", "text"),
    [
        (("2.13.0+cpu", None, None, None), TorchBuild("2.13.0+cpu"), "2.13.0+cpu"),
        (("2.13.0+cu130", "13.0", None, None), TorchBuild("2.13.0+cu130", "13.0"), "2.13.0+cu130, cuda 13.0"),
        (
            ("2.13+rocm7.1", None, "7.1.2", None),
            TorchBuild("2.13+rocm7.1", hip="7.1.2"),
            "2.13+rocm7.1, hip 7.1.2",
        ),
        (("2.13.0+xpu", None, None, "20250302"), TorchBuild("2.13.0+xpu", xpu="20250302"), "2.13.0+xpu, xpu 20250302"),
        (("2.14.0+xpu", None, None, None), TorchBuild("2.14.0+xpu", xpu="2.14.0+xpu"), "2.14.0+xpu, xpu 2.14.0+xpu"),
    ],
)
def test_builds(install: object, fields: tuple[str | None, ...], build: TorchBuild, text: str) -> None:
    version, cuda, hip, xpu = fields
    install(VERSION.format(version=version, cuda=cuda, hip=hip, xpu=xpu))  # type: ignore[operator]
    assert torch_build() == build
    assert str(build) == text
    assert "torch" not in sys.modules


def test_plain_assignments_count_too(install: object) -> None:
    install("__version__ = '2.11.0+cu128'\ncuda = '12.8'\nhip = None\ncomputed = 'a' + 'b'\n")  # type: ignore[operator]
    assert torch_build() == TorchBuild("2.11.0+cu128", "12.8")


@pytest.mark.parametrize("version", [None, "", "this is not Python\n", "\0"])
def test_a_tree_that_is_no_torch(install: object, version: str | None) -> None:
    install(version)  # type: ignore[operator]
    assert torch_build() == TorchBuild()
    assert str(torch_build()) == "not installed"


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch_build() == TorchBuild()


def test_a_stand_in_without_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("torch")
    stand_in.__spec__ = None
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    assert torch_build() == TorchBuild()
