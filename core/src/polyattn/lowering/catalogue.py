"""The lowerings there are, by name and in the order in which ties are decided."""

from __future__ import annotations

import functools
import importlib

from ..errors import PluginError, did_you_mean
from .base import Lowering

__all__ = ["LOWERINGS", "get_lowering", "lowerings"]

LOWERINGS = (
    "layout",
    "realign",
    "fold_scale",
    "additive_mask",
    "alibi_as_bias",
    "chunk_as_batch",
    "segments_as_sequences",
    "segments_as_mask",
    "sinks_from_lse",
    "pad_head_dim",
    "pad_value_dim",
    "crop_value_dim",
    "expand_gqa_heads",
    "align_causal",
    "trim_window",
    "pack_sequences",
    "pad_sequences",
    "expand_block_map",
    "finer_pages",
    "page_table_to_tokens",
    "write_new_rows",
    "dequantise_kv",
    "tree_by_lse",
    "chunked_prefix_by_lse",
    "kv_parts_by_lse",
    "state_layout",
    "compute_gates",
    "gather_states",
    "draft_by_draft",
)
"""Each is the name of a module of this package, with one `Lowering` of that name."""


@functools.cache
def get_lowering(name: str) -> Lowering:
    """The lowering of a name.

    Raises:
        PluginError: there is none; a capability row named it.
    """
    if name not in LOWERINGS:
        raise PluginError(
            f"a capability row names the lowering {name!r}, which does not exist.{did_you_mean(name, LOWERINGS)} "
            f"Known: {', '.join(LOWERINGS)}"
        )
    module = importlib.import_module(f"{__package__}.{name}")
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and getattr(kind, "name", None) == name]
    lowering: Lowering = found[0]()
    return lowering


@functools.cache
def lowerings() -> tuple[Lowering, ...]:
    """Return all lowerings; imports their modules, not torch."""
    return tuple(get_lowering(name) for name in LOWERINGS)
