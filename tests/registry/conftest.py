"""Distributions that look installed and are not: a module, and a dist-info folder that announces it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyattn.registry.manager import PluginManager, reset_manager

HOST = "0.1.0"

HEAD = """
from polyattn.contract import hookimpl
from polyattn.contract import *


def info(name, platform="cpu", dtype=("float32",), target="polyattn.backends.reference_backend:Reference", **more):
    rows = (row(family="dense", dtype=dtype, head_dim=Range(1)),)
    more = {"providers": (Provider("own", rows, target),), "summary": "made for a test", **more}
    return BackendInfo(name, platform, **more)


def needs(*requires):
    return (Provider("own", (row(family="dense", head_dim=Range(1)),), "m:C", requires),)
"""
"""What every fake plugin starts with: `info(...)` makes a record that is fine as it stands, `needs(...)` providers that
require something."""


class Site:
    """A folder on `sys.path`. `add` installs a fake distribution, `load` is a host that allows only those."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.names: list[str] = []
        self.modules: list[str] = []
        self._monkeypatch = monkeypatch
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)

    def add(
        self,
        name: str,
        source: str = "",
        *,
        module: str = "",
        distribution: str = "",
        version: str = "1.0",
        requires: tuple[str, ...] = (),
        entry: str = "",
    ) -> str:
        """Install a plugin called `name`; returns its module. `entry` overrides what the entry point says."""
        distribution = distribution or f"fake-{name}"
        module = module or distribution.replace("-", "_")
        (self.folder / f"{module}.py").write_text(HEAD + textwrap.dedent(source))
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}")
        (info / "entry_points.txt").write_text(f"[polyattn.backends]\n{name} = {entry or module}\n")
        self.names.append(name)
        self.modules.append(module)
        return module

    def module(self, module: str, source: str) -> str:
        """Write a plugin module that no distribution announces; returns its name."""
        (self.folder / f"{module}.py").write_text(HEAD + textwrap.dedent(source))
        self.modules.append(module)
        return module

    def host(self, **environ: str) -> PluginManager:
        """A manager that has not loaded yet."""
        allowed = {"POLYATTN_PLUGINS": ",".join(self.names)}
        return PluginManager(environ={**allowed, **environ}, host_version=HOST)

    def load(self, **environ: str) -> PluginManager:
        return self.host(**environ).load()

    def use(self, **environ: str) -> PluginManager:
        """Load, and make it this process's manager for the test."""
        manager = self.load(**environ)
        reset_manager(manager)
        return manager


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path / "site", monkeypatch)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)
    reset_manager()
