"""Modules under the names they had before version 0.2, for one minor version.

This folder is part of `polyattn.__path__`. `records` and `hookspecs` belong to contract 1: they stay, without a
warning.

| old name | new name |
|---|---|
| `polyattn.records`, `polyattn.hookspecs` | `polyattn.contract` |
| `polyattn.plugins` | `polyattn.registry.manager` |
| `polyattn.platforms` | `polyattn.registry.platforms` |
| `polyattn.reference` | `polyattn.semantics.reference` |
| `polyattn.quantised` | `polyattn.semantics.kv_quant` |
| `polyattn.config` | `polyattn.selection.config` |
| `polyattn.inspection` | `polyattn.selection.inspection` |
| `polyattn.op_plans` | `polyattn.dispatch.compile.op_plans` |
| `polyattn.latent` | `polyattn.serving.mla` |
"""

from __future__ import annotations

import warnings

__all__ = ["warn"]


def warn(old: str, new: str) -> None:
    """Tell the importer of an old name what the module is called now."""
    warnings.warn(f"{old} is {new} now; the old name goes with version 0.3", DeprecationWarning, stacklevel=3)
