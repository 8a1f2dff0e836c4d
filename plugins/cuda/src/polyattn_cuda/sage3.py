"""Family `dense` by SageAttention 3: FP4 on SM120. [B, H, S, D], scaled by D ** -0.5; it takes no LSE, mask or scale.

It would centre the caller's keys in place, so it is given a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import load, with_aligned_inputs
from polyattn.contract import AttentionRequest, Bound

from .records.diffusion import SAGE_3

__all__ = ["Sage3"]


class Sage3:
    """Binds dense requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        given = {"is_causal": request.causal != "none", "per_block_mean": True}
        kernel = load(SAGE_3, "sageattn3:sageattn3_blackwell", dict.fromkeys(given, "polyattn"))
        turned = request.layout == "BSHD"

        def forward(query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None, **_: Any) -> Tensor:
            q, k, v = (t.transpose(1, 2) if turned else t for t in (query, key, value))
            result = kernel(q=q, k=k.clone(memory_format=torch.contiguous_format), v=v, **given)
            result = result.transpose(1, 2) if turned else result
            return result if out is None else out.copy_(result)

        return with_aligned_inputs(Bound(forward))
