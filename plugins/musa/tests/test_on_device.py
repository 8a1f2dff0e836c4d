"""Conformance of every MUSA backend with the real library on a GPU; not run, and said so, where either is missing."""

from __future__ import annotations

from polyattn.testing.emulators import device_suites
from polyattn_musa.plugin import BACKENDS

SUITES = device_suites(BACKENDS, __name__)
globals().update(SUITES)


def test_every_backend_has_an_adapter() -> None:
    assert set(SUITES) == {"TestFa", "TestFa3", "TestSageAttn"}
