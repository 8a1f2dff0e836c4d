"""This module has what rewrites of paged and latent calls share: pools of pages (`polyattn.semantics.paged_kv`) and
merged results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..contract import AttentionRequest
from ..semantics.merge_lse import merge
from ..semantics.paged_kv import Pool, Slots, Tokens, from_column, in_use, owned, renumbered
from .tensors import deliver

__all__ = ["Pool", "Slots", "Tokens", "from_column", "in_use", "merged", "owned", "renumbered"]


def merged(
    request: AttentionRequest, parts: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None, out: Tensor | None
) -> Any:
    """Return what the call returns, from (out, lse) over parts of its keys. Sinks count once, here (S5)."""
    outs, lses = zip(*parts, strict=True)
    result = (outs[0], lses[0]) if len(parts) == 1 and sinks is None else merge(outs, lses, sinks=sinks, layout="THD")
    return deliver(result if request.lse else result[0], out)
