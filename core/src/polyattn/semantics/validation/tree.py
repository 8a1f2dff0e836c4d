"""Checks of a call that promises a mask of a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...contract import KVPart, PagedTables
from ...errors import InvalidInputError
from .tensors import contents_readable


def check_tree(attn_mask: Any, tables: PagedTables, chunked_prefix: bool, kv_parts: Sequence[KVPart]) -> None:
    """Check what `tree=True` promises of a mask [N|1, H_q|1, max_seqlen_q, max_seqlen_k] that is checked already."""
    if attn_mask is None or attn_mask.dtype != torch.bool:
        shown = "None" if attn_mask is None else attn_mask.dtype
        raise InvalidInputError(
            f"tree=True goes with a bool attn_mask, not with {shown}; make it with "
            f"polyattn.semantics.reference.verify_mask"
        )
    for name, given, instead in (
        ("chunked_prefix=True", chunked_prefix, "drafts are few and attend their prefix in one piece: leave it out"),
        ("kv_parts", bool(kv_parts), "pass attn_mask over the call's own keys and leave tree out"),
    ):
        if given:
            raise InvalidInputError(f"tree=True and {name} exclude each other: {instead}")
    if not contents_readable(attn_mask):
        return
    drafts, seq_lens = tables.cu_seqlens_q.diff(), tables.seq_lens
    rows = torch.arange(attn_mask.shape[2], device=attn_mask.device) < drafts[:, None]
    columns = torch.arange(attn_mask.shape[3], device=attn_mask.device) < (seq_lens - drafts)[:, None]
    hidden = ~attn_mask & rows[:, None, :, None] & columns[:, None, None, :]
    if bool(hidden.any()):
        n, _, row, column = hidden.nonzero()[0].tolist()
        raise InvalidInputError(
            f"tree=True says that every draft sees all keys before the drafts, but attn_mask hides key {column} from "
            f"row {row} of sequence {n}, which has {int(seq_lens[n] - drafts[n])} of them; leave tree out for such a "
            f"mask"
        )
