"""Conformance of every ROCm backend that has an adapter, with the real library on a GPU; not run, and said so, where
either is missing."""

from __future__ import annotations

from polyattn.testing.emulators import device_suites
from polyattn_rocm.plugin import BACKENDS

globals().update(device_suites(BACKENDS, __name__))
