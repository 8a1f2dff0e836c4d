"""The custom ops: one opaque op per family, with a fake and autograd, for what torch.compile cannot trace.

Their `plan` argument is JSON and holds everything needed to bind the same kernel again (`op_plans.py`), so that a saved
graph can be run by another process. They are registered as soon as both polyattn and torch are imported
(`registration.py`); what runs them is imported when one runs.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


@functools.cache
def op_plans() -> Any:
    """Imported when an op runs first: it takes longer than all of this."""
    return import_module(".op_plans", __package__)


@torch.library.custom_op("polyattn::dense", mutates_args=())
def _dense_op(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, plan: str
) -> tuple[Tensor, Tensor]:
    query, key, value = op_plans().dense_axes(query, key, value)
    found: tuple[Tensor, Tensor] = op_plans().forward(plan, query, key, value, attn_mask=attn_mask, sinks=sinks)
    return found


@_dense_op.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, plan: str
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = op_plans().outputs(plan, query, value)
    return found


@torch.library.custom_op("polyattn::dense_backward", mutates_args=())
def _dense_backward_op(
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    plan: str,
) -> list[Tensor]:
    found: list[Tensor] = op_plans().backward(
        plan, dout, dlse, query, key, value, sinks, out, lse, {"attn_mask": attn_mask}
    )
    return found


@_dense_backward_op.register_fake
def _(dout: Any, dlse: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Any, out: Tensor,
      lse: Tensor, plan: str) -> list[Tensor]:  # fmt: skip
    return _fake_grads(query, key, value, sinks)


@torch.library.custom_op("polyattn::varlen", mutates_args=())
def _varlen_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    plan: str,
) -> tuple[Tensor, Tensor]:
    given = _lens(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    from ...semantics import validation

    query, key, value = op_plans().dense_axes(query, key, value)
    # A trace sees neither contents nor the counts that become known when the graph runs.
    validation.check_varlen(query, key, value, attn_mask=attn_mask, sinks=sinks, out=None, **given)
    validation.check_lengths(query, key, **given)
    found: tuple[Tensor, Tensor] = op_plans().forward(
        plan, query, key, value, attn_mask=attn_mask, sinks=sinks, **given
    )
    return found


@_varlen_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Any, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
      max_seqlen_q: int, max_seqlen_k: int, plan: str) -> tuple[Tensor, Tensor]:  # fmt: skip
    found: tuple[Tensor, Tensor] = op_plans().outputs(plan, query, value)
    return found


@torch.library.custom_op("polyattn::varlen_backward", mutates_args=())
def _varlen_backward_op(
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    out: Tensor,
    lse: Tensor,
    plan: str,
) -> list[Tensor]:
    given = {"attn_mask": attn_mask, **_lens(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)}
    found: list[Tensor] = op_plans().backward(plan, dout, dlse, query, key, value, sinks, out, lse, given)
    return found


@_varlen_backward_op.register_fake
def _(dout: Any, dlse: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Any, cu_seqlens_q: Tensor,
      cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, out: Tensor, lse: Tensor, plan: str,
      ) -> list[Tensor]:  # fmt: skip
    return _fake_grads(query, key, value, sinks)


def _lens(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> dict[str, Any]:
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}


def _fake_grads(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> list[Tensor]:
    shaped = (query, key, value) if sinks is None else (query, key, value, sinks)
    return [t.new_empty(t.shape) for t in shaped]


def _dense_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.plan = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _dense_autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, mask, sinks, out, lse = ctx.saved_tensors
    dlse = dlse if lse.numel() else None
    grads = torch.ops.polyattn.dense_backward(dout, dlse, query, key, value, mask, sinks, out, lse, ctx.plan)
    return (*grads[:3], None, grads[3] if sinks is not None else None, None)


def _varlen_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.max_q, ctx.max_k, ctx.plan = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _varlen_autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, mask, sinks, cu_q, cu_k, out, lse = ctx.saved_tensors
    dlse = dlse if lse.numel() else None
    grads = torch.ops.polyattn.varlen_backward(
        dout, dlse, query, key, value, mask, sinks, cu_q, cu_k, ctx.max_q, ctx.max_k, out, lse, ctx.plan
    )
    return (*grads[:3], None, grads[3] if sinks is not None else None, None, None, None, None, None)


_dense_op.register_autograd(_dense_autograd, setup_context=_dense_context)
_varlen_op.register_autograd(_varlen_autograd, setup_context=_varlen_context)


def _second(ctx: Any, *grads: Any) -> Any:
    op_plans().refuse_second()


_dense_backward_op.register_autograd(_second)
_varlen_backward_op.register_autograd(_second)
