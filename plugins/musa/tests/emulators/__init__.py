"""Libraries for MUSA in plain torch on the CPU, from the sources of mate 0.2.2 (github.com/MooreThreads/mate, 3f58cc3).

Their functions refuse tensors that are not on a MUSA device; the emulators take those of the CPU instead.
"""

from __future__ import annotations

from pathlib import Path

from polyattn.testing.emulators import Signatures

__all__ = ["SIGNATURES"]

SIGNATURES = Signatures(Path(__file__).parents[1] / "signatures.json")
