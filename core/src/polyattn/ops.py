"""The custom ops: one opaque op per family, with a fake and autograd, for what torch.compile cannot trace.

Their `plan` argument is JSON and holds everything needed to bind the same kernel again, so that a saved graph can be
run by another process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import validate
from .autograd import attention_backward, refuse_second
from .contract import Bound
from .defects import affecting, narrowing
from .epoch import EPOCH
from .errors import PluginError
from .lowering import Plan, Planner, bind
from .plugins import get_manager
from .records import AttentionRequest
from .request_text import plain_request, read_request
from .selection import Selection
from .tracing import observed

__all__ = ["op_plan"]


def op_plan(request: AttentionRequest, selection: Selection) -> str:
    """A choice as text, for the `plan` argument of the ops."""
    return json.dumps(
        {
            "backend": selection.backend,
            "platform": selection.platform,
            "provider": selection.provider,
            "lowerings": selection.lowerings,
            "request": plain_request(request),
        },
        sort_keys=True,
    )


@functools.lru_cache(maxsize=512)
def _bound(text: str, epoch: int) -> tuple[AttentionRequest, Bound]:
    """Bind a plan's kernel; `epoch` makes a plugin that was replaced be asked again, and a kernel for its choices."""
    data = json.loads(text)
    request = read_request(data["request"], "a compiled graph")
    manager = get_manager()
    info = manager.backends[data["backend"], data["platform"]]
    provider = next(p for p in info.providers if p.name == data["provider"])
    plan = Plan(request)
    if data["lowerings"]:
        narrow = narrowing(manager.narrow, info, affecting(provider), named=True)
        planner = Planner(provider.rows, narrow=narrow, only=data["lowerings"])
        found = planner.plan(dataclasses.replace(request, options=()))
        if found is None:
            raise PluginError(
                f"{info.id} no longer takes what a compiled graph was made for by {', '.join(data['lowerings'])}; "
                f"compile it again"
            )
        plan = found

    def load(inner: AttentionRequest) -> Bound:
        return manager.load_forward(info, provider, dataclasses.replace(inner, options=request.options))

    return request, observed(bind(plan, load, _no_helper), request, info.id)


def _no_helper(helper: Any) -> Bound:
    raise PluginError(f"{helper} helps calls over a cache only, which are not compiled")


def _dense_axes(*tensors: Tensor) -> list[Tensor]:
    """Strides are the compiler's choice; kernels need a dense last axis (S1)."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def _call(plan: str, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    bound = _bound(plan, EPOCH.value)[1]
    result = bound.forward(query, key, value, **given)
    out, lse = result if isinstance(result, tuple) else (result, query.new_empty(0, dtype=torch.float32))
    inputs = (query, key, value)
    lse = lse.to(_lse_dtype(query)) if lse.numel() else lse
    # The op promises contiguous outputs that alias no input, whatever the kernel gave.
    out = out.contiguous()
    return (out.clone() if any(out.data_ptr() == t.data_ptr() for t in inputs) else out), lse.contiguous()


def _gives_lse(plan: str) -> bool:
    request, bound = _bound(plan, EPOCH.value)
    return request.lse or (bound.backward is not None and bool(request.grad))


def _fake(plan: str, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    shape: Sequence[Any] = query.shape[:-1] if _gives_lse(plan) else (0,)
    return out, query.new_empty(shape, dtype=_lse_dtype(query) if _gives_lse(plan) else torch.float32)


def _lse_dtype(query: Tensor) -> torch.dtype:
    """S6: fp32, and fp64 for float64 inputs."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@torch.library.custom_op("polyattn::dense", mutates_args=())
def _dense_op(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, plan: str
) -> tuple[Tensor, Tensor]:
    query, key, value = _dense_axes(query, key, value)
    return _call(plan, query, key, value, attn_mask=attn_mask, sinks=sinks)


@_dense_op.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, plan: str
) -> tuple[Tensor, Tensor]:
    return _fake(plan, query, value)


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
    return _backward(plan, dout, dlse, query, key, value, sinks, out, lse, {"attn_mask": attn_mask})


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
    query, key, value = _dense_axes(query, key, value)
    # A trace sees neither contents nor the counts that become known when the graph runs.
    validate.check_varlen(query, key, value, attn_mask=attn_mask, sinks=sinks, out=None, **given)
    validate.check_lengths(query, key, **given)
    return _call(plan, query, key, value, attn_mask=attn_mask, sinks=sinks, **given)


@_varlen_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Any, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
      max_seqlen_q: int, max_seqlen_k: int, plan: str) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _fake(plan, query, value)


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
    return _backward(plan, dout, dlse, query, key, value, sinks, out, lse, given)


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


def _backward(
    plan: str,
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    given: dict[str, Any],
) -> list[Tensor]:
    request, bound = _bound(plan, EPOCH.value)
    query, key, value = _dense_axes(query, key, value)
    axis = 2 if request.family == "dense" and request.layout == "BSHD" else 1
    if bound.backward is not None:
        found: tuple[Tensor | None, ...] = attention_backward(
            bound.backward, dout, dlse, query, key, value, out, lse, sinks, axis, given
        )
    else:
        found = _recompute(bound, dout, dlse, query, key, value, sinks, given)
    shaped = (query, key, value) if sinks is None else (query, key, value, sinks)
    return [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if g is None else g.contiguous().clone()
        for g, t in zip(found, shaped, strict=False)
    ]


def _recompute(
    bound: Bound,
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    given: dict[str, Any],
) -> tuple[Tensor | None, ...]:
    """Gradients of a forward built from torch ops, by running it again with autograd on."""
    leaves = [t.detach().requires_grad_() for t in (query, key, value, *(() if sinks is None else (sinks,)))]
    with contextlib.ExitStack() as stack:
        # An op's body runs below autograd; recording a graph in it means including those keys again.
        for name in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(getattr(torch._C.DispatchKey, name), False))
        stack.enter_context(torch.enable_grad())
        result = bound.forward(*leaves[:3], sinks=leaves[3] if sinks is not None else None, **given)
        results = result if isinstance(result, tuple) else (result,)
        pairs = [(r, g) for r, g in zip(results, (dout, dlse), strict=False) if g is not None]
        if not pairs:
            return (None, None, None, None)
        return torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)


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
    refuse_second()


_dense_backward_op.register_autograd(_second)
_varlen_backward_op.register_autograd(_second)
