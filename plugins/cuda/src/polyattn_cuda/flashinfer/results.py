"""From what FlashInfer's kernels return to what a call returns (S5 to S7)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest

__all__ = ["blanked", "delivered", "natural", "writable"]


def natural(lse: Tensor | None) -> Tensor | None:
    """An LSE of base 2 as the natural one, in place."""
    return None if lse is None else lse.mul_(math.log(2.0))


def writable(out: Tensor | None) -> Tensor | None:
    """`out` where the kernels can write it: they know no strides of it, and write 16 bytes at a time."""
    return out if out is not None and out.is_contiguous() and not out.data_ptr() & 15 else None


def blanked(found: Tensor, lse: Tensor | None, alive: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """0 and -inf in the rows of queries that see no key, in place: versions differ in what they leave there.

    Args:
        found: [T_q, H_q, D_v]; lse: [T_q, H_q]; alive: bool [T_q], None = all.
    """
    if alive is None:
        return found, lse
    found.masked_fill_(~alive[:, None, None], 0.0)
    return found, None if lse is None else lse.masked_fill_(~alive[:, None], -torch.inf)


def delivered(
    request: AttentionRequest,
    found: Tensor,
    lse: Tensor | None,
    alive: Tensor | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> Any:
    """What the call returns, from a result without sinks and its natural LSE, which sinks need."""
    found, lse = blanked(found, lse, alive)
    if sinks is not None and lse is not None:
        # A row without keys is 0 whatever its share is; -inf would meet a sink of -inf.
        found.mul_(torch.sigmoid(lse.masked_fill(lse == -torch.inf, 0.0) - sinks.float()).unsqueeze(-1))
    if out is not None and found is not out:
        found = out.copy_(found)
    return (found, lse) if request.lse else found
