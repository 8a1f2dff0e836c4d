"""Checks of a call's arguments: host-visible facts always, tensor contents where reading them is free (S1, S8, S9).

Every check raises InvalidInputError naming what, which value, what is allowed and the next step.
"""

from __future__ import annotations

from ...contract.overlap import shares_memory
from .common import check_alibi, check_out
from .dense import check_dense
from .kv_parts import check_kv_parts
from .linear import LinearOptions, check_linear, check_traced_gates, check_words
from .mla import check_mla, check_token_indices
from .paged import check_new_keys, check_page_table, check_paged, check_serving_options
from .statics import LAYOUTS, check_statics
from .stored import check_saving, check_storage
from .tensors import (
    FLOATS,
    check_dense_axis,
    check_plain,
    check_tensor,
    contents_readable,
    has_shapes_only,
    local_only,
    overlaps_itself,
    unread,
)
from .tree import check_tree
from .varlen import PackedCheck, TensorGuards, check_cu_seqlens, check_lengths, check_varlen

__all__ = [
    "FLOATS",
    "LAYOUTS",
    "LinearOptions",
    "PackedCheck",
    "TensorGuards",
    "check_alibi",
    "check_cu_seqlens",
    "check_dense",
    "check_dense_axis",
    "check_kv_parts",
    "check_lengths",
    "check_linear",
    "check_mla",
    "check_new_keys",
    "check_out",
    "check_page_table",
    "check_paged",
    "check_plain",
    "check_saving",
    "check_serving_options",
    "check_statics",
    "check_storage",
    "check_tensor",
    "check_token_indices",
    "check_traced_gates",
    "check_tree",
    "check_varlen",
    "check_words",
    "contents_readable",
    "has_shapes_only",
    "local_only",
    "overlaps_itself",
    "shares_memory",
    "unread",
]
