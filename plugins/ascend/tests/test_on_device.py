"""Conformance of every backend here with torch_npu on an NPU; not run, and said so, where either is missing."""

from __future__ import annotations

from polyattn.testing.emulators import device_suites
from polyattn_ascend.plugin import BACKENDS

SUITES = device_suites(BACKENDS, __name__)
globals().update(SUITES)


def test_both_are_among_them() -> None:
    assert set(SUITES) == {"TestFa", "TestAscend"}
