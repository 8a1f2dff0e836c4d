"""Conformance of every CUDA backend that has an adapter, with the real library on a GPU; not run, and said so, where
either is missing."""

from __future__ import annotations

from polyattn.testing.emulators import device_suites
from polyattn_cuda.plugin import BACKENDS

SUITES = device_suites(BACKENDS, __name__)
globals().update(SUITES)


def test_flash_attention_is_among_them() -> None:
    assert {"TestFa", "TestFa2", "TestFa3", "TestFa4"} <= set(SUITES)
