"""What the conformance tests share."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polyattn.registry.evidence import read_evidence
from polyattn.registry.manager import PluginManager, get_manager, reset_manager

ADAPTER = '''
import functools

import torch

from polyattn.backends.reference_backend import Reference


class Acme(Reference):
    """The reference under another name."""
'''
PLUGIN = """
from polyattn.contract import hookimpl
from polyattn.contract import *

ROWS = (
    row(
        family="dense",
        dtype=("float32", "bfloat16"),
        head_dim=Range(8, 128, multiple_of=8),
        causal=("none", "bottom_right"),
        lse=True,
        s_relation=("equal", "one", "fewer", "more"),
        misaligned=True,
    ),
)


@hookimpl
def polyattn_register_backends():
    provider = Provider("acme", ROWS, "acme_kernels.adapter:Acme")
    claims = globals().get("CLAIMS", {})
    yield BackendInfo("acme", "cpu", (provider,), summary="for tests", narrowed=tuple(NARROWED), **claims)
"""
"""Text of a plugin; what a test puts before it may define NARROWED and CLAIMS, what it puts behind may be a hook."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: compiles a program, seconds each; leave out with -m 'not slow'")


Acme = Callable[..., Path]


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Acme]:
    """`acme(before="", behind="")` registers a plugin with the backend acme@cpu; its folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = get_manager()
    # One of its own: what this test registers is gone with it.
    reset_manager(PluginManager(kept.environ, kept.host_version))

    def register(before: str = "", behind: str = "", adapter: str = ADAPTER) -> Path:
        folder = tmp_path / "acme_kernels"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "adapter.py").write_text(adapter)
        texts = ("NARROWED = ()", before, PLUGIN, behind)
        (folder / "plugin.py").write_text("\n".join(textwrap.dedent(text) for text in texts))
        get_manager().register("acme_kernels.plugin", "acme")
        return folder

    yield register
    reset_manager(kept)
    read_evidence.cache_clear()
    for name in [name for name in sys.modules if name.startswith("acme_kernels")]:
        del sys.modules[name]
