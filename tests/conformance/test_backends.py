"""Every declared capability of core's backends on this machine's CPU, and a refusal of everything else."""

from __future__ import annotations

import functools

import pytest

from polyattn.testing import Case, Installed, plan, run_case
from polyattn.testing.calls import sayable

BACKENDS = ("torch_sdpa", "torch_native", "flex_attention", "reference")
LEAST = 2000
"""Cases there must be, whatever the budget of time."""


@functools.cache
def target(backend: str) -> Installed:
    return Installed(backend, "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        level = "full" if metafunc.config.getoption("--polyattn-full") else "quick"
        cases = [(name, case) for name in BACKENDS for case in plan(target(name), level=level)]
        metafunc.parametrize("backend, case", cases, ids=[f"{name}-{case.id}" for name, case in cases])


def test_case(backend: str, case: Case) -> None:
    outcome = run_case(target(backend), case)
    assert outcome.verdict == ("refused" if case.check == "refusal" else "passed"), str(outcome)


def test_there_are_enough_cases() -> None:
    assert sum(len(plan(target(name))) for name in BACKENDS) >= LEAST


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_ways_are_taken(backend: str) -> None:
    """Many cases go through the public calls; what those cannot say goes to the bound functions."""
    families = ["dense", "varlen"]
    served = [case for case in plan(target(backend), families=families) if case.check != "refusal"]
    said = sum(map(sayable, served))
    assert 0.25 * len(served) < said < len(served)
