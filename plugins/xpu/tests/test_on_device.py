"""Conformance of every backend of this plugin with the real library on its device; not run, and said so, where either
is missing."""

from __future__ import annotations

from polyattn.testing.emulators import device_suites
from polyattn_xpu.plugin import BACKENDS

globals().update(device_suites(BACKENDS, __name__))


def test_all_are_built() -> None:
    assert {info.id for info in BACKENDS if not info.planned} == {
        "fa@xpu",
        "intel_xpu@xpu",
        "intel_amx@cpu",
        "ipex@cpu",
    }
