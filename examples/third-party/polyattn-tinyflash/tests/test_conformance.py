"""What the records declare is computed, and everything else is refused: polyattn's own cases, one test each."""

from __future__ import annotations

from polyattn.testing import AttentionConformance


class TestConformance(AttentionConformance):
    backend = "tinyflash"
