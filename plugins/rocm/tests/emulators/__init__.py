"""Libraries for ROCm in plain torch on the CPU, one file for each."""

from __future__ import annotations

from pathlib import Path

from polyattn.testing.emulators import Signatures

__all__ = ["SIGNATURES"]

SIGNATURES = Signatures(Path(__file__).parents[1] / "signatures.json")
