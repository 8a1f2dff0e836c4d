"""`torch_native`: packed sequences served one SDPA call at a time; correct everywhere, fast nowhere."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from ..contract import AttentionRequest, Bound, SRelation
from .torch_sdpa import TorchSDPA

__all__ = ["TorchNative"]


class TorchNative:
    """Binds varlen requests. Autograd runs through the per-sequence calls, so `forward` is differentiable itself."""

    def bind(self, request: AttentionRequest) -> Bound:
        return Bound(functools.partial(_forward, request), traceable=False)


@functools.lru_cache(maxsize=1024)
def _sequence(request: AttentionRequest, relation: SRelation) -> Bound:
    """The dense call for one sequence of this relation between its lengths."""
    dense = dataclasses.replace(request, family="dense", layout="BHSD", s_relation=relation)
    # A sequence starts wherever the one before it ended.
    return TorchSDPA().bind(dataclasses.replace(dense, misaligned=True).normalised())


def _relation(s_q: int, s_k: int) -> SRelation:
    if s_q == 1 and s_k > 1:
        return "one"
    return "equal" if s_q == s_k else "fewer" if s_q < s_k else "more"


def _forward(
    request: AttentionRequest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for i in range(len(starts_q) - 1):
        q = query[starts_q[i] : starts_q[i + 1]]
        k = key[starts_k[i] : starts_k[i + 1]]
        v = value[starts_k[i] : starts_k[i + 1]]
        if not len(q):
            continue
        if not len(k):
            outs.append(q.new_zeros(len(q), q.shape[1], value.shape[2]))
            lses.append(q.new_full((len(q), q.shape[1]), float("-inf"), dtype=torch.float32))
            continue
        bound = _sequence(request, _relation(len(q), len(k)))
        result = _call(bound, request, q, k, v, sinks)
        if isinstance(result, tuple):
            lses.append(result[1][0].transpose(0, 1))
            result = result[0]
        outs.append(result[0].transpose(0, 1))
    empty = query.new_zeros(0, query.shape[1], value.shape[2])
    packed = torch.cat([*outs, empty])
    lse = torch.cat([*lses, query.new_zeros(0, query.shape[1], dtype=torch.float32)]) if request.lse else None
    some = [t for t in (query, key, value) if t.requires_grad] if torch.is_grad_enabled() else []
    if some and not packed.requires_grad:
        # No sequence has both queries and keys: gradients are 0 (S7), not missing.
        everything = torch.ones((), dtype=torch.bool, device=query.device)
        nothing = torch.stack([t.masked_fill(everything, 0).sum() for t in some]).sum()
        packed = packed + nothing.to(packed.dtype)
        lse = None if lse is None else lse + nothing.to(lse.dtype)
    if out is not None:
        packed = out.copy_(packed)
    return packed if lse is None else (packed, lse)


def _call(bound: Bound, request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Any:
    views = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    if bound.backward is None or not request.grad:
        return bound.forward(*views, sinks=sinks)
    from ..semantics.autograd import differentiable

    return differentiable(bound, request.lse)(*views, sinks=sinks)
