"""Whose queries are whose, for kernels with a row of the page table for each query of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["owners"]


def owners(query: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """int64 [T_q], the sequence of each query; those without a query in a step are nobody's."""
    token = torch.arange(query.shape[0], device=query.device, dtype=torch.int32)
    return torch.searchsorted(cu_seqlens_q[1:].contiguous(), token, right=True)
