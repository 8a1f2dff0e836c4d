"""The checks of paged and latent calls under their former name: `polyattn.semantics.validation` has them."""

from __future__ import annotations

from .validation import check_kv_parts, check_mla, check_saving, check_storage, check_tree

__all__ = ["check_kv_parts", "check_mla", "check_saving", "check_storage", "check_tree"]
