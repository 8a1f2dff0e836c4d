"""AITER: the kit over an emulator of both versions, and what its entry points are really called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library

from .emulators import aiter as emulator

# build: (version, chip, provider of `fa`, provider of `aiter`)
BUILDS: dict[str, tuple[str, str, str, str]] = {
    "0.1.20": ("0.1.20", "gfx942", "aiter", "amd-aiter"),
    "0.1.20-gfx950": ("0.1.20", "gfx950", "", "amd-aiter"),
    "0.1.20-gfx1201": ("0.1.20", "gfx1201", "", "amd-aiter"),
    "0.1.7": ("0.1.7", "gfx942", "aiter-0.1.7", "amd-aiter-0.1.7"),
}


def target(build: str, *, serving: bool = True) -> Emulated:
    _, chip, dense, cached = BUILDS[build]
    return Emulated("aiter", cached, f"rocm:{chip}") if serving else Emulated("fa", dense, f"rocm:{chip}")


SAGE = Emulated("aiter_sage", "amd-aiter", "rocm:gfx942")


def families(build: str) -> dict[str, Emulated]:
    """What is tried of a build, and by which backend."""
    paged = {"paged": target(build), "mla": target(build)}
    if build == "0.1.20-gfx1201":
        return {"paged": target(build)}
    return paged if "-" in build else {**paged, "dense": target(build, serving=False), "varlen": target(build)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    full = metafunc.config.getoption("--polyattn-full")
    given: dict[str, Any] = {"per_row": 24} if full else {"per_row": 3, "dtypes": ("bfloat16",)}
    metafunc.parametrize(
        ("build", "tried", "case"),
        [
            pytest.param(build, tried, case, id=f"{build}-{case.id}")
            for build in BUILDS
            for family, tried in families(build).items()
            for case in tried.cases(**given, families=(family,))
        ]
        + [pytest.param("0.1.20", SAGE, case, id=f"sage-{case.id}") for case in SAGE.cases(**given)],
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Library]:
    return lambda build: emulator.library(*BUILDS[build][:2]).install(monkeypatch)


def test_conformance(build: str, tried: Emulated, case: Case, install: Callable[[str], Library]) -> None:
    tried.passes(case, install(build))
