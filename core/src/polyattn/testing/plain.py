"""Two solutions of one problem: the float64 reference, and plain torch math that keeps every step in the case's dtype.

The second is what anybody would write first; its error is the yardstick of FlashAttention's rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .. import reference
from ..records import AttentionRequest
from .families import FAMILIES
from .problems import Problem

__all__ = ["Solution", "in_float64", "plainly", "solve"]

Method = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, AttentionRequest], tuple[Tensor, Tensor]]
"""(query, key, value, attn_mask, sinks, request) of heads-first tensors -> (out, lse)."""


@dataclasses.dataclass(frozen=True)
class Solution:
    """out and lse in the shapes of the family's call, and the gradients by input name."""

    out: Tensor
    lse: Tensor
    grads: Mapping[str, Tensor]


def in_float64(problem: Problem) -> Solution:
    """The reference in float64: what is right."""
    return solve(problem, _reference, torch.float64)


def plainly(problem: Problem) -> Solution:
    """Plain torch math in the dtype of the case."""
    return solve(problem, _plain, problem.dtype)


def solve(problem: Problem, method: Method, dtype: torch.dtype) -> Solution:
    """Solve a problem, gradients included, with a function for one group of sequences of equal lengths."""
    request, family = problem.request, FAMILIES[problem.request.family]
    wanted = [name for name in request.grad if name != "lse"]
    leaves = {
        name: t.detach().to(dtype if t.dtype.is_floating_point else t.dtype).requires_grad_(name in wanted)
        for name, t in problem.tensors.items()
    }
    sinks = leaves.get("sinks")
    parts = [method(*part, sinks, request) for part in family.parts(problem.case, leaves, problem.extra)]
    out, lse = family.join(problem.case, [p[0] for p in parts], [p[1] for p in parts])
    if not wanted:
        return Solution(out.detach(), lse.detach(), {})
    outputs, upstream = [out], [problem.dout.to(out.dtype)]
    if request.lse:
        outputs.append(lse)
        upstream.append(problem.dlse.to(lse.dtype))
    found = torch.autograd.grad(outputs, [leaves[n] for n in wanted], upstream, materialize_grads=True)
    return Solution(out.detach(), lse.detach(), dict(zip(wanted, found, strict=True)))


def _scale(request: AttentionRequest) -> float:
    return request.head_dim**-0.5 if request.scale is None else request.scale


def _reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, request: AttentionRequest
) -> tuple[Tensor, Tensor]:
    out, lse = reference.attention(
        query,
        key,
        value,
        causal=request.causal,
        window=request.window,
        chunk=request.chunk,
        softcap=request.softcap,
        sinks=sinks,
        attn_mask=mask,
        scale=_scale(request),
        layout="BHSD",
        return_lse=True,
        compute_dtype=torch.float64,
    )
    return out, lse


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, request: AttentionRequest
) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.transpose(-1, -2) * _scale(request)
    if request.softcap:
        logits = request.softcap * torch.tanh(logits / request.softcap)
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask
    elif mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    seen = reference.visible(
        query.shape[2],
        key.shape[2],
        causal=request.causal,
        window=request.window,
        chunk=request.chunk,
        device=query.device,
    )
    if seen is not None:
        logits = logits.masked_fill(~seen, float("-inf"))
    empty = (logits == float("-inf")).all(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)
    # The LSE is float32 by definition (S6), whatever the logits were rounded to.
    lse = torch.logsumexp(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    if sinks is not None:
        column = sinks[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], -1)
    weights = torch.softmax(logits, -1)[..., : key.shape[2]]
    out = weights.masked_fill(empty, 0.0) @ value
    return out, lse.masked_fill(empty[..., 0], float("-inf"))
