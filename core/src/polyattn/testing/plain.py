"""Two solutions of one problem: the float64 reference, and plain torch math that keeps every step in the case's dtype.

The second is what anybody would write first; its error is the yardstick of FlashAttention's rule.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..contract import AttentionRequest
from ..semantics import reference

if TYPE_CHECKING:
    from .problems import Problem

__all__ = [
    "Method",
    "Solution",
    "cancelling",
    "in_float64",
    "plain_attention",
    "plainly",
    "reference_attention",
    "softmax_terms",
    "solve",
]

Method = Callable[..., tuple[Tensor, Tensor]]
"""The mathematics of one part of a problem: (*part, sinks, request) -> (out, second). Of softmax families: (query, key,
value, attn_mask, sinks, request) of heads-first tensors -> (out, lse)."""


@dataclasses.dataclass(frozen=True)
class Solution:
    """out and what comes beside it in the shapes of the family's call, and the gradients by input name."""

    out: Tensor
    lse: Tensor
    grads: Mapping[str, Tensor]


def in_float64(problem: Problem) -> Solution:
    """The reference in float64: what is right."""
    return solve(problem, problem.family.exact, torch.float64)


def plainly(problem: Problem) -> Solution:
    """Plain torch math in the dtype of the case."""
    method = problem.family.plain
    if problem.case.far and method is plain_attention:
        # Half a nat is one rounding of a logit of 107 in bfloat16: a yardstick that would allow anything.
        method = functools.partial(plain_attention, logits=torch.float32)
    return solve(problem, method, problem.dtype)


def solve(problem: Problem, method: Method, dtype: torch.dtype) -> Solution:
    """Solve a problem, gradients included, with a function for one group of sequences of equal lengths."""
    request, family = problem.request, problem.family
    wanted = family.differentiated(problem.case)
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
    if problem.through_lse:
        outputs.append(lse)
        upstream.append(problem.dlse.to(lse.dtype))
    found = torch.autograd.grad(outputs, [leaves[n] for n in wanted], upstream, materialize_grads=True)
    return Solution(out.detach(), lse.detach(), dict(zip(wanted, found, strict=True)))


SCORES = 2**22
"""Scores of one part that are held at a time, 32 MiB in float64: longer ones are computed a few queries at a time, and
once more for their gradients."""


def _by_rows(method: Method) -> Method:
    """The same mathematics with no more scores in memory than `SCORES`. `method` takes a `q_offset`, see
    `polyattn.semantics.reference.visible`."""

    @functools.wraps(method)
    def computed(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        request: AttentionRequest,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        (batch, heads, s_q, _), s_k = query.shape, key.shape[2]
        first = 0 if request.causal == "top_left" else s_k - s_q
        rows = max(SCORES // max(batch * heads * s_k, 1), 1)
        if rows >= s_q:
            return method(query, key, value, mask, sinks, request, q_offset=first, **options)
        found = []
        for start in range(0, s_q, rows):
            some = slice(start, start + rows)
            given = (query[:, :, some], key, value, None if mask is None else mask[:, :, some], sinks, request)
            part = functools.partial(method, q_offset=first + start, **options)
            found.append(checkpoint(part, *given, use_reentrant=False, preserve_rng_state=False))
        return torch.cat([out for out, _ in found], 2), torch.cat([second for _, second in found], 2)

    return computed


@_by_rows
def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    request: AttentionRequest,
    *,
    q_offset: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The reference of heads-first tensors, in float64: (out, lse)."""
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
        scale=request.scale,
        layout="BHSD",
        return_lse=True,
        compute_dtype=torch.float64,
        q_offset=q_offset,
    )
    return out, lse


@_by_rows
def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    request: AttentionRequest,
    *,
    q_offset: int | None = None,
    logits: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain torch math of heads-first tensors, every step in their dtype: (out, lse). `logits`: the dtype of logits and
    softmax, where that is another one."""
    key, value = _repeated(query, key), _repeated(query, value)
    product = query @ key.transpose(-1, -2) if logits is None else _product(query, key, logits)
    weights, lse = _weights(product, mask, sinks, request, q_offset)
    return weights[..., : key.shape[2]].to(value.dtype) @ value, lse


def _repeated(query: Tensor, shared: Tensor) -> Tensor:
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], 1)


class _Product(torch.autograd.Function):
    """query @ key in another dtype, and its gradient in theirs: as kernels do it, which keep logits in registers and
    round what they multiply."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(query, key)
        wide = torch.promote_types(query.dtype, dtype)
        return query.to(wide) @ key.to(wide).transpose(-1, -2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        query, key = ctx.saved_tensors
        grad = grads[0].to(query.dtype)
        return grad @ key, grad.transpose(-1, -2) @ query, None


_product: Callable[..., Tensor] = _Product.apply


def _weights(
    product: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    request: AttentionRequest,
    q_offset: int | None,
) -> tuple[Tensor, Tensor]:
    """(softmax weights [B, H_q, S_q, S_k], with a last column for the sinks if there are any; lse) of query @ key."""
    logits = product * request.softmax_scale
    if request.softcap:
        logits = request.softcap * torch.tanh(logits / request.softcap)
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask
    elif mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    seen = reference.visible(
        *product.shape[2:],
        causal=request.causal,
        window=request.window,
        chunk=request.chunk,
        device=product.device,
        q_offset=q_offset,
    )
    if seen is not None:
        logits = logits.masked_fill(~seen, float("-inf"))
    empty = (logits == float("-inf")).all(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)
    # The LSE is float32 by definition (S6), whatever the logits were rounded to.
    lse = torch.logsumexp(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:-1], 1)], -1)
    weights = torch.softmax(logits, -1).masked_fill(empty, 0.0)
    return weights, lse.masked_fill(empty[..., 0], float("-inf"))


def cancelling(problem: Problem) -> Mapping[str, Tensor]:
    """Return the sum of the absolute values of the terms of each gradient: what rounding errors are proportional to.

    dS = P * (dP - delta) cancels, wholly where a query sees a single key: the gradient is 0 there, while any kernel is
    left with the rounding of dP and delta. No error relative to the gradient itself could allow for that.
    """
    method = problem.family.terms
    if method is None:
        return {name: torch.zeros((), dtype=torch.float64) for name in problem.family.differentiated(problem.case)}
    upstream = dataclasses.replace(problem, dout=problem.dout.abs(), dlse=problem.dlse.abs())
    return {name: terms.abs() for name, terms in solve(upstream, method, torch.float64).grads.items()}


@_by_rows
def softmax_terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    request: AttentionRequest,
    *,
    q_offset: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Functions linear in |inputs| whose gradients, for upstream gradients >= 0, are those sums."""
    key, value = _repeated(query, key), _size(_repeated(query, value))
    columns = key.shape[2]
    with torch.no_grad():
        product = query @ key.transpose(-1, -2)
        alone, _ = _weights(product, mask, None, request, q_offset)
        weights, _ = _weights(product, mask, sinks, request, q_offset)
        kept, sunk = weights[..., :columns], weights[..., columns:]
    query, key = _size(query), _size(key)
    moved = query @ key.transpose(-1, -2) * abs(request.softmax_scale)
    if mask is not None and mask.requires_grad:
        moved = moved + mask.masked_fill(mask.isinf(), 0.0)
    out = kept @ value + (kept * moved) @ value.detach()
    if sinks is not None:
        shift = sunk * sinks.masked_fill(sinks.isinf(), 0.0)[:, None, None]
        out = out + shift * (kept @ value).detach()
    return out, (alone * moved).sum(-1)


def _size(tensor: Tensor) -> Tensor:
    """|tensor| with a slope of 1 at 0 too, where that of `abs` is 0."""
    return torch.where(tensor < 0, -tensor, tensor)
