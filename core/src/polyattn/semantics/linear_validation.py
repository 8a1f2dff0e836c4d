"""The checks of linear attention calls under their former name: `polyattn.semantics.validation` has them."""

from __future__ import annotations

from .validation import check_linear, check_words

__all__ = ["check_linear", "check_words"]
