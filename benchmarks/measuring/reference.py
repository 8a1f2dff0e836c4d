"""Attention in float64, for the few rows of a problem that are checked."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attention", "distance", "gradients"]

_CHUNK = 1024
"""Queries whose logits are held at once."""


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor | None = None) -> Tensor:
    """
    Args:
        query: [..., R, D]; key: [..., S_k, D]; value: [..., S_k, D_v]. seen: bool, broadcastable to [..., R, S_k].

    Returns:
        float64 [..., R, D_v].
    """
    logits = query.double() @ key.double().mT * scale
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    return logits.softmax(-1) @ value.double()


def gradients(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one KV head and the G query heads that share it: dquery [G, S, D], dkey [S, D], dvalue [S, D_v], float64.

    Args:
        dout: [G, S, D_v]; query: [G, S, D]; key: [S, D]; value: [S, D_v].
    """
    k, v = key.double(), value.double()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dq = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    places = torch.arange(k.shape[0], device=k.device)
    for head in range(query.shape[0]):
        for start in range(0, query.shape[1], _CHUNK):
            some = slice(start, start + _CHUNK)
            q, do = query[head, some].double(), dout[head, some].double()
            logits = q @ k.T * scale
            if causal:
                logits.masked_fill_(places > places[some, None], -torch.inf)
            p = logits.softmax(-1)
            dv += p.T @ do
            dp = do @ v.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
            dq[head, some] = ds @ k
            dk += ds.T @ q
    return dq, dk, dv


def distance(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """(relative L2 distance, that of the worst row); infinite where something found is not finite.

    The distance of a row is measured by its own norm, or the average one where its own is smaller.
    """
    if found.shape != wanted.shape:
        raise ValueError(f"the result is {list(found.shape)} where {list(wanted.shape)} is wanted")
    if not bool(torch.isfinite(found).all()):
        return float("inf"), float("inf")
    off = (found.double() - wanted).flatten(0, -2).norm(dim=-1)
    norms = wanted.flatten(0, -2).norm(dim=-1)
    return float(off.norm() / norms.norm()), float((off / norms.clamp(min=norms.mean())).max())
