"""torch-npu 2.13 as the adapters see it."""

from __future__ import annotations

from polyattn.testing.emulators import Library

from . import SIGNATURES, fusion, inference

__all__ = ["library"]


def library(version: str = "2.13.0") -> Library:
    """A fresh one."""
    lib = Library("torch-npu", version, "torch_npu", signatures=SIGNATURES)
    fusion.register(lib)
    inference.register(lib)
    return lib
