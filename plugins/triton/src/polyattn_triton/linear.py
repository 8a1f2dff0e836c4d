"""The `triton` backend's linear attention: gated delta rules, GDN and KDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Bound
from polyattn.semantics.delta_rule import chunked_delta_rule

from . import runtime
from .kernels.delta_chunks import chunk_of, prepare, through
from .kernels.linear_recurrent import recurrent

__all__ = ["Linear"]


_STEPS = 16
"""Tokens that a chunk takes longer for than steps."""


class Linear:
    """Binds linear requests. Where gradients are wanted, `forward` is a function of autograd."""

    def bind(self, request: AttentionRequest) -> Bound:
        turned, every = request.state_layout == "VK", request.state_out == "every"
        scale = request.head_dim**-0.5 if request.scale is None else request.scale
        options = {"raw": request.raw_gates, "beta_range": request.beta_range, "norm": request.qk_norm}

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            gate: Tensor,
            beta: Tensor,
            state: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            a_log: Tensor | None = None,
            dt_bias: Tensor | None = None,
            gate_bound: float | None = None,
            state_slots: Tensor | None = None,
            parents: Tensor | None = None,
            out: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:
            runtime.check_device(query.device)
            result = torch.empty_like(value, memory_format=torch.contiguous_format) if out is None else out
            D, D_v = query.shape[-1], value.shape[-1]
            sizes = (value.shape[2], D_v, D) if turned else (value.shape[2], D, D_v)
            if every:
                last = value.new_empty(*value.shape[:2], *sizes, dtype=torch.float32)
            elif state_slots is not None and state is not None:
                last = state
            else:
                count = value.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
                last = value.new_empty(count, *sizes, dtype=torch.float32)
            rows = tuple(_dense(t) for t in (query, key, value, gate, beta))
            learned = {"a_log": a_log, "dt_bias": dt_bias}
            learned = {name: None if t is None else t.contiguous() for name, t in learned.items()}
            learned |= {"bound": gate_bound or 0.0, **options}
            shared = {"scale": scale, "cu_seqlens": cu_seqlens}
            if every or not _in_chunks(query, cu_seqlens):
                recurrent(
                    *rows, state, out=result, last=last, turned=turned, slots=state_slots, parents=parents,
                    every=every, **learned, **shared,
                )  # fmt: skip
            else:
                query, key, value, gate, beta = rows
                made = prepare(query, key, gate, beta, chunk=chunk_of(query), **learned, **shared)
                through(
                    query, key, value, state, made, out=result, last=last, turned=turned, slots=state_slots, **shared
                )
            return result, last

        if not request.grad:
            return Bound(forward)

        def differentiable(
            query: Tensor, key: Tensor, value: Tensor, *, gate: Tensor, beta: Tensor, state: Tensor | None = None,
            cu_seqlens: Tensor | None = None, out: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            result, last = _Trained.apply(forward, scale, turned, query, key, value, gate, beta, state, cu_seqlens)
            return (result if out is None else out.copy_(result)), last

        return Bound(differentiable)


class _Trained(torch.autograd.Function):
    """The kernels forward, and the gradients of the chunked form, which is computed again."""

    @staticmethod
    def forward(ctx: Any, run: Any, scale: float, turned: bool, *tensors: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*tensors)
        ctx.scale, ctx.turned = scale, turned
        query, key, value, gate, beta, state, cu_seqlens = tensors
        found: tuple[Tensor, Tensor] = run(query, key, value, gate=gate, beta=beta, state=state, cu_seqlens=cu_seqlens)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, cu_seqlens = ctx.saved_tensors[:-1], ctx.saved_tensors[-1]
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_() for t in saved]
            query, key, value, gate, beta, state = leaves
            first = state.mT if ctx.turned and state is not None else state
            out, last = chunked_delta_rule(
                query, key, value, gate=gate, beta=beta, state=first, cu_seqlens=cu_seqlens, scale=ctx.scale
            )
            last = last.mT if ctx.turned else last
        given = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad((out, last), given, grads, allow_unused=True))
        return None, None, None, *(None if t is None else next(found) for t in leaves), None


def _in_chunks(query: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether products of chunks take less time than a step for each token.

    Packed sequences are always taken so: what is computed of one depends on no other.
    """
    if query.dtype == torch.float32 and not runtime.INTERPRETED:
        return False
    tokens = query.shape[1]
    return tokens > 0 and (tokens > _STEPS or cu_seqlens is not None)


def _dense(tensor: Tensor) -> Tensor:
    """`tensor` with a dense last axis."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
