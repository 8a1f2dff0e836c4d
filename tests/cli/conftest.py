"""Commands are run as a shell would run them, in this process: `run("list", "--json")`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polyattn.cli import main, rendering
from polyattn.registry.manager import get_manager, reset_manager
from polyattn.selection import overrides
from polyattn.selection.inspection import detect

VENDORS = ("ascend", "cuda", "musa", "rocm", "triton", "xpu")


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture(scope="session", autouse=True)
def every_vendor_package_is_here() -> None:
    plugins = get_manager().plugins
    absent = [f"plugins/{name}" for name in VENDORS if name not in plugins or plugins[name].state != "ready"]
    if absent:
        pytest.fail(f"install {' '.join(absent)} first (pip install -e), or name them in POLYATTN_EXTRA_PLUGINS")


@pytest.fixture(autouse=True)
def a_plain_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No configuration from outside, and none left behind."""
    for name in ("POLYATTN_CONFIG", "POLYATTN_ATTENTION_BACKEND", "POLYATTN_STRICT", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(rendering, "EVERY", float("inf"))  # how many lines of progress there are depends on the load
    detect.cache_clear()
    overrides.configure()
    yield
    monkeypatch.undo()
    detect.cache_clear()
    overrides.configure()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> Result:
        capsys.readouterr()
        code = main(list(words))
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """`plugin("acme", "raise ValueError('x')")`: a plugin module of that text beside the others, for this test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [f"polyattn_{name}.plugin" for name in VENDORS]

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}_plugin.py").write_text(text)
        found.append(f"{name}_plugin")
        monkeypatch.delitem(sys.modules, f"{name}_plugin", raising=False)
        monkeypatch.setenv("POLYATTN_EXTRA_PLUGINS", ",".join(found))
        reset_manager()
        return f"{name}_plugin"

    yield write
    monkeypatch.undo()
    for module in found[len(VENDORS) :]:
        sys.modules.pop(module, None)
    reset_manager()
