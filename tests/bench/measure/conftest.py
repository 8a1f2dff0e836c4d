"""A store of its own for each test, core's backends and nobody else's; and a package of backends that misbehave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polyattn import tuning
from polyattn.registry.manager import reset_manager
from polyattn.selection import overrides

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "tuning.sqlite3"
    monkeypatch.setenv("POLYATTN_TUNING_STORE", str(path))
    for name in ("POLYATTN_TUNING", "POLYATTN_TRACE", "POLYATTN_ATTENTION_BACKEND", "POLYATTN_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POLYATTN_PLUGINS", "")
    monkeypatch.setattr(tuning.offline, "_serving", [])
    reset_manager()
    overrides.configure()
    tuning.reload()
    yield path
    monkeypatch.undo()
    reset_manager()
    overrides.configure()
    tuning.reload()


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`odd("lies", "quick")`: these backends of `odd_plugin` are installed."""

    def install(*names: str) -> None:
        monkeypatch.syspath_prepend(str(HERE))
        monkeypatch.setenv("POLYATTN_PLUGINS", "odd_plugin")
        monkeypatch.setenv("POLYATTN_EXTRA_PLUGINS", "odd_plugin")
        monkeypatch.setenv("ODD_BACKENDS", ",".join(names))
        monkeypatch.delitem(sys.modules, "odd_plugin", raising=False)
        reset_manager()
        tuning.reload()

    return install
