"""Sequences packed along one axis: whose a token is."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["per_token", "sequence_ids"]


def sequence_ids(tokens: int, cu_seqlens: Tensor) -> Tensor:
    """int64 [tokens], the sequence of each packed token; one without tokens owns none. Nothing waits for the device.

    Args:
        cu_seqlens: [N+1], of any integer dtype.
    """
    token = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)


def per_token(tokens: int, cu_seqlens: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """Return what sequences have, for each packed token: for kernels with a query for each sequence, in a step in which
    some sequence has none.

    Args:
        tokens, cu_seqlens: as `sequence_ids`. rows: [N, ...], such as a page table and lengths.

    Returns:
        [tokens, ...] each.
    """
    owner = sequence_ids(tokens, cu_seqlens)
    return tuple(row[owner] for row in rows)
