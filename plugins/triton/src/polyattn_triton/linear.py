"""The `triton` backend's linear attention: gated delta rules, GDN and KDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Bound

from . import runtime
from .kernels.delta_chunks import Prepared, chunk_of, prepare, through
from .kernels.delta_gradients import gradients
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
            # Kernels read one number after the other.
            cu_seqlens, state_slots = (None if t is None else t.contiguous() for t in (cu_seqlens, state_slots))
            result = torch.empty_like(value, memory_format=torch.contiguous_format) if out is None else out
            if every:
                last = value.new_empty(*value.shape[:2], *_sizes(query, value, turned), dtype=torch.float32)
            elif state_slots is not None and state is not None:
                last = state
            else:
                last = _states(query, value, cu_seqlens, turned)
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
            result, last = _Trained.apply(scale, turned, query, key, value, gate, beta, state, cu_seqlens)
            return (result if out is None else out.copy_(result)), last

        return Bound(differentiable)


class _Trained(torch.autograd.Function):
    """Chunks forward and backward. What was prepared of them is kept; the states between them are computed again."""

    @staticmethod
    def forward(ctx: Any, scale: float, turned: bool, *tensors: Any) -> tuple[Tensor, Tensor]:
        query, key, value, gate, beta, state, cu_seqlens = tensors
        runtime.check_device(query.device)
        query, key, value, gate, beta = (_dense(t) for t in (query, key, value, gate, beta))
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        shared = {"scale": scale, "cu_seqlens": cu_seqlens}
        made = prepare(query, key, gate, beta, chunk=chunk_of(query), **shared)
        out, last = value.new_empty(value.shape), _states(query, value, cu_seqlens, turned)
        through(query, key, value, state, made, out=out, last=last, turned=turned, **shared)
        ctx.save_for_backward(query, key, value, gate, beta, state, cu_seqlens, *made)
        ctx.scale, ctx.turned = scale, turned
        return out, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, cu_seqlens = ctx.saved_tensors[:7]
        made = Prepared(*ctx.saved_tensors[7:])
        found = gradients(*grads, *given, made, scale=ctx.scale, turned=ctx.turned, cu_seqlens=cu_seqlens)
        wanted = zip(found, ctx.needs_input_grad[2:], strict=False)
        return None, None, *(tensor if wants else None for tensor, wants in wanted), None


def _states(query: Tensor, value: Tensor, cu_seqlens: Tensor | None, turned: bool) -> Tensor:
    """Room for a state of each sequence."""
    count = value.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return value.new_empty(count, *_sizes(query, value, turned), dtype=torch.float32)


def _sizes(query: Tensor, value: Tensor, turned: bool) -> tuple[int, int, int]:
    heads, D, D_v = value.shape[2], query.shape[-1], value.shape[-1]
    return (heads, D_v, D) if turned else (heads, D, D_v)


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
