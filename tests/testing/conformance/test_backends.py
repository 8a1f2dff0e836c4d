"""Every declared capability of core's backends on this machine's CPU, and a refusal of everything else."""

from __future__ import annotations

import pytest

from polyattn.testing import AttentionConformance, Installed, plan
from polyattn.testing.calls import sayable

BACKENDS = ("torch_sdpa", "torch_native", "flex_attention", "reference")
LEAST = 2000
"""Cases there must be, whatever the budget of time."""


@pytest.mark.slow(keep=350)
class TestTorchSDPA(AttentionConformance):
    backend, device = "torch_sdpa", "cpu"


@pytest.mark.slow(keep=600)
class TestTorchNative(AttentionConformance):
    backend, device = "torch_native", "cpu"


@pytest.mark.slow(keep=60)
class TestFlexAttention(AttentionConformance):
    backend, device = "flex_attention", "cpu"


@pytest.mark.slow(keep=350)
class TestReference(AttentionConformance):
    backend, device = "reference", "cpu"


def test_there_are_enough_cases() -> None:
    assert sum(len(plan(Installed(name))) for name in BACKENDS) >= LEAST


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_ways_are_taken(backend: str) -> None:
    """Many cases go through the public calls; what those cannot say goes to the bound functions."""
    families = ["dense", "varlen"]
    served = [case for case in plan(Installed(backend), families=families) if case.check != "refusal"]
    said = sum(map(sayable, served))
    assert 0.25 * len(served) < said < len(served)
