"""The definition of the gated delta rules under its former name: `polyattn.semantics.reference` has it."""

from __future__ import annotations

from .reference import gated_delta_rule, unit_rows

__all__ = ["gated_delta_rule", "unit_rows"]
