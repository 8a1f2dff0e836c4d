"""This module finds the borders of packed sequences where only `position_ids` say them: a sequence begins where they
are 0 again.

transformers looks for them when it makes a mask, but not where a model keeps a cache, which is on by default while a
model trains too. So causal layers look again: once per forward pass, because all layers get the same tensor.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor

from .keywords import More

__all__ = ["Borders", "find_borders", "refuse_borders", "starts_of", "with_borders"]


@dataclasses.dataclass(frozen=True)
class Borders:
    """Borders of packed sequences: `sequence` int [B, S], whose each token is; `cu` int32 [N+1], where they begin in
    the tokens of all rows one after the other; `longest` of them."""

    sequence: Tensor
    cu: Tensor
    longest: int


def with_borders(
    more: More | None,
    sinks: Tensor | None,
    position_ids: Any,
    batch: int,
    mask: Any,
    module: Any,
    is_causal: bool | None,
) -> More | None:
    """Add the borders that positions say to the keywords of a call over as many keys as queries.

    Lengths or numbers of sequences that were given go first. Where the mask says more than causality, both must allow a
    key. A compiled model does not look at numbers: while it trains it always gets a mask, otherwise positions are not
    read.

    Args:
        position_ids: [B|1, S]; other forms, such as those of several axes, say nothing. sinks, batch: of the call.
    """
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        return more
    if more is not None and (more.cu_q is not None or more.sequence is not None):
        return more
    if torch.compiler.is_compiling():
        if module.training and _is_causal(module, is_causal):
            sequence = (position_ids == 0).cumsum(-1)
            return dataclasses.replace(more or More(sinks=sinks), sequence=sequence)
        return more
    found = _known(position_ids)
    if found is None or not _is_causal(module, is_causal):
        return more
    more = more or More(sinks=sinks)
    if mask is None and more.bias is None and len(position_ids) == batch:
        return dataclasses.replace(more, cu_q=found.cu, cu_k=found.cu, max_q=found.longest, max_k=found.longest)
    return dataclasses.replace(more, sequence=found.sequence)


def _is_causal(module: Any, said: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if said is None else said)


_last: tuple[Any, int, Borders | None] = (lambda: None, 0, None)
"""The positions that were looked at last, weakly; their version; what was found."""


def _known(position_ids: Tensor) -> Borders | None:
    global _last
    seen, version, found = _last
    now = 0 if position_ids.is_inference() else position_ids._version
    if seen() is not position_ids or version != now:
        found = find_borders(position_ids)
        _last = (weakref.ref(position_ids), now, found)
    return found


def starts_of(position_ids: Any, mask: Any) -> Tensor | None:
    """Return where packed sequences begin in the tokens of all rows, int32 [N+1], as positions alone say it; None where
    each row is one sequence.

    Args:
        position_ids: [B, S]; other forms say nothing. mask: [B, S], 0 = padding, whose positions say nothing, or None.
    """
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2 or position_ids.shape[1] < 2:
        return None
    found = _known(position_ids)
    if found is None or not isinstance(mask, Tensor) or mask.shape != position_ids.shape:
        return None if found is None else found.cu
    begins = _begins(position_ids, mask)
    if not bool(begins.any()):
        return None
    begins[:, 0] = True
    edges = begins.flatten().nonzero().flatten()
    return torch.cat([edges, edges.new_tensor([begins.numel()])]).int()


def refuse_borders(position_ids: Any, mask: Any) -> None:
    """Let a compiled model fail where positions say borders: what it computes is fixed before their numbers are known.

    Args:
        position_ids, mask: as of `starts_of`.
    """
    if isinstance(position_ids, Tensor) and position_ids.ndim == 2 and position_ids.shape[1] > 1:
        torch._assert_async(~_begins(position_ids, mask).any(), _COMPILED)


_COMPILED = (
    "polyattn: position_ids start again at 0 within a row, and a compiled model cannot keep packed sequences apart by "
    "them in linear attention: give cu_seq_lens_q and its partners, or a row for each sequence"
)


def _begins(position_ids: Tensor, mask: Any) -> Tensor:
    """bool [B, S]: where a sequence begins behind another of its row. Padding is none."""
    starts = position_ids == 0
    if isinstance(mask, Tensor) and mask.shape == position_ids.shape:
        valid = mask != 0
        return starts & valid & (valid.cumsum(-1) > 1)
    return torch.cat([torch.zeros_like(starts[:, :1]), starts[:, 1:]], 1)


def find_borders(position_ids: Tensor) -> Borders | None:
    """Find the sequences packed into rows of positions [B, S]; None where each row is one."""
    if position_ids.is_meta or (position_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None  # no numbers to look at
    starts = position_ids == 0
    if not bool(starts[:, 1:].any()):
        return None
    sequence = starts.cumsum(-1)
    starts[:, 0] = True
    begins = starts.flatten().nonzero().flatten()
    cu = torch.cat([begins, begins.new_tensor([starts.numel()])]).int()
    return Borders(sequence, cu, int(cu.diff().max()))
