"""This module has the float32 arithmetic that emulated kernels share: who sees whom, scores, LSE, weights, output and
gradients.

Queries are [..., S_q, H_q, D], keys [..., S_k, H_kv, D], values [..., S_k, H_kv, D_v]; scores and weights
[..., H_q, S_q, S_k], an LSE [..., H_q, S_q]. What a library does its own way (a base, a rounding, a mask's polarity,
rows that see nothing) is its emulator's. `polyattn.semantics.reference`, which the kit compares with, has no
part in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["band", "gradients", "lse_of", "scores", "weighted", "weights_of"]


def band(s_q: int, s_k: int, left: int = -1, right: int = -1) -> Tensor:
    """Return which query sees which key, bool [S_q, S_k]: so many keys before a query's own place and behind it, -1 =
    all. Places are counted from the lower right corner (S3, S4); causal is a right bound of 0."""
    gap = torch.arange(s_k) - torch.arange(s_q)[:, None] - (s_k - s_q)
    seen = torch.ones(s_q, s_k, dtype=torch.bool)
    if left >= 0:
        seen &= gap >= -left
    if right >= 0:
        seen &= gap <= right
    return seen


def scores(query: Tensor, key: Tensor, scale: float, seen: Tensor | None = None, softcap: float = 0.0) -> Tensor:
    """Scaled and capped logits, -inf for what is not `seen` (True = attend)."""
    found = torch.einsum("...qhd,...khd->...hqk", query.float(), _per_head(key, query.shape[-2])) * scale
    if softcap:
        found = softcap * torch.tanh(found / softcap)
    return found if seen is None else found.masked_fill(~seen, -torch.inf)


def lse_of(scores: Tensor, sink: Tensor | None = None) -> Tensor:
    """Natural, with the sink [H_q] in it if there is one; -inf for a row that sees nothing."""
    # Of no keys at all torch has no maximum.
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    return lse if sink is None else torch.logaddexp(lse, sink.float()[:, None])


def weights_of(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); of a row that sees nothing 0."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()


def weighted(weights: Tensor, value: Tensor) -> Tensor:
    """The output [..., S_q, H_q, D_v]."""
    return torch.einsum("...hqk,...khd->...qhd", weights, _per_head(value, weights.shape[-3]))


def gradients(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    weights: Tensor,
    scale: float,
    *,
    slope: Tensor | float = 1.0,
    rounded: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dquery, dkey, dvalue) in their dtypes, as kernels have them: from the weights, and from dout and out.

    Args:
        slope: of the softcap, by score. rounded: how weights and gradients of scores meet the other factor.
    """
    dout, (H_kv, group) = dout.float(), (key.shape[-2], query.shape[-2] // key.shape[-2])
    delta = (dout * out.float()).sum(-1).transpose(-2, -1)[..., None]
    dweights = torch.einsum("...qhd,...khd->...hqk", dout, _per_head(value, query.shape[-2]))
    dscores = (weights * (dweights - delta) * slope).to(rounded).float()
    dquery = torch.einsum("...hqk,...khd->...qhd", dscores, _per_head(key, query.shape[-2])) * scale
    dkey = torch.einsum("...hqk,...qhd->...khd", dscores, query.float()) * scale
    dvalue = torch.einsum("...hqk,...qhd->...khd", weights.to(rounded).float(), dout)
    dkey, dvalue = (t.reshape(*t.shape[:-2], H_kv, group, t.shape[-1]).sum(-2) for t in (dkey, dvalue))
    return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)


def _per_head(shared: Tensor, heads: int) -> Tensor:
    return shared.float().repeat_interleave(heads // shared.shape[-2], -2)
