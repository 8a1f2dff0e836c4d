"""Which queries see no key. Nothing but torch's oldest operators: Intel Extension for PyTorch runs beside torch 2.8."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest

__all__ = ["blind"]


def blind(request: AttentionRequest, query: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """bool [T_q]: queries that see no key (S7). Nothing waits for the device."""
    token = torch.arange(query.shape[0], device=query.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), token, right=True)
    keys = seq_lens[sequence]
    right = 0 if request.causal != "none" else request.window[1]
    if right < 0:
        return keys == 0
    position = keys - (cu_seqlens_q[sequence + 1] - token)
    return (position + right < 0) | (keys == 0)
