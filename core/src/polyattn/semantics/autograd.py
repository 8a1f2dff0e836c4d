"""Training over any backend that has a backward: gradients through the output, the LSE and the sinks, exactly.

A kernel's backward computes dS = P * (dP - delta) with P = exp(S - lse), dP = dout . v and delta = rowsum(dout * out),
and knows neither the LSE's gradient nor sinks. Both are substitutions it cannot tell from an ordinary call:

- sinks widen the denominator: pass lse' = logaddexp(lse, sink) and the final output; the sink's own gradient is
  -sum over rows of sigmoid(sink - lse) * rowsum(dout * out);
- the LSE's gradient adds P * dlse: a second call with value = 0 and dout, out chosen so that delta = -dlse (dlse is
  split into two columns, so that a half-precision `out` does not round it).

It is the first derivative and no more: a second one is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..contract import Bound
from ..errors import PluginError, UnsupportedRequestError

__all__ = ["attention_backward", "differentiable", "recomputed_backward", "recording", "refuse_second"]


def attention_backward(
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    head_axis: int,
    extra: Mapping[str, Any],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dquery, dkey, dvalue, dsinks) for gradients `dout` of the output and `dlse` of the LSE (None = not used).

    Args:
        backward: the backend's; see `polyattn.contract.DenseBackward`.
        out, lse: as the forward returned them: out with the sinks in it, lse without.
        head_axis: axis of H_q in `lse`.
        extra: tensors the backward also takes (attn_mask, cu_seqlens...).
    """
    dq = dk = dv = dsinks = None
    if dout is not None:
        total = lse
        if sinks is not None:
            shape = [1] * lse.ndim
            shape[head_axis] = -1
            sink = sinks.to(lse.dtype).view(shape)
            total = torch.logaddexp(lse, sink)
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            others = [axis for axis in range(lse.ndim) if axis != head_axis]
            # Rows without keys have delta = 0; their LSE must not meet a sink of -inf, which would give NaN.
            finite = lse.masked_fill(lse == float("-inf"), 0.0)
            dsinks = -(torch.sigmoid(sink - finite) * delta).sum(others).to(sinks.dtype)
        dq, dk, dv = backward(dout, query, key, value, out, total, **extra)
    if dlse is not None:
        # Rows without keys have no weights to move: their LSE is -inf whatever the inputs are.
        wanted = dlse.masked_fill(lse == float("-inf"), 0.0)
        high = (-wanted).to(query.dtype)
        low = (-wanted - high.to(wanted.dtype)).to(query.dtype)
        # Two columns carry dlse where there are two; a head dim of 1 has room for the leading part only.
        probe, ones = torch.zeros_like(out), torch.zeros_like(out)
        probe[..., -1], ones[..., -1] = low, 1
        probe[..., 0], ones[..., 0] = high, 1
        eq, ek, _ = backward(ones, query, key, torch.zeros_like(value), probe, lse, **extra)
        dq = eq if dq is None else dq + eq
        dk = ek if dk is None else dk + ek
    return dq, dk, dv, dsinks


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        bound: Bound,
        head_axis: int,
        extra: Mapping[str, Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        given = dict(extra) if sinks is None else {**extra, "sinks": sinks}
        out, lse = bound.forward(query, key, value, **given)
        ctx.set_materialize_grads(False)
        ctx.bound, ctx.head_axis = bound, head_axis
        # Masks and lengths are read again: autograd must know, to tell of one that was written to in between.
        ctx.names = [name for name, one in extra.items() if isinstance(one, Tensor)]
        ctx.host = {name: one for name, one in extra.items() if not isinstance(one, Tensor)}
        ctx.save_for_backward(query, key, value, out, lse, sinks, *(extra[name] for name in ctx.names))
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, out, lse, sinks, *tensors = ctx.saved_tensors
        extra = {**ctx.host, **dict(zip(ctx.names, tensors, strict=True))}
        given = (dout, dlse, query, key, value, out, lse, sinks)
        if torch.compiler.is_compiling():
            # By compiled autograd, which looks into what can be traced and leaves the rest to eager code.
            run = attention_backward if ctx.bound.traceable else _untraced
            return (None, None, None, *run(ctx.bound.backward, *given, ctx.head_axis, extra))
        _refuse_many(dout, dlse)
        if torch.is_grad_enabled():
            apply: Callable[..., tuple[Tensor | None, ...]] = _Backward.apply
            return (None, None, None, *apply(ctx.bound.backward, ctx.head_axis, extra, *given))
        return (None, None, None, *attention_backward(ctx.bound.backward, *given, ctx.head_axis, extra))


def _untraced(backward: Callable[..., Any], *given: Any) -> tuple[Tensor | None, ...]:
    return attention_backward(backward, *given)


# `torch.compiler.disable` without its import of dynamo, which costs as much as torch itself.
_untraced._torchdynamo_disable = True  # type: ignore[attr-defined]


class _Backward(torch.autograd.Function):
    """`attention_backward` as autograd sees it while it records gradients, to differentiate them again."""

    @staticmethod
    def forward(
        ctx: Any, backward: Callable[..., Any], head_axis: int, extra: Mapping[str, Any], *tensors: Any
    ) -> tuple[Tensor | None, ...]:
        given = (*tensors, head_axis, extra)
        return attention_backward(backward, *given)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second()


def _refuse_many(*grads: Tensor | None) -> None:
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is not None or any(
        grad is not None and functorch.is_legacy_batchedtensor(grad) for grad in grads
    ):
        raise UnsupportedRequestError(
            "gradients of many outputs are wanted at once (vectorize=True, is_grads_batched=True or vmap over a "
            "backward) of attention whose gradient a kernel computes, which takes them one by one. Leave that argument "
            'out, or make the call with backend="reference", whose gradients may be batched'
        )


def refuse_second() -> NoReturn:
    """Say that a kernel's gradients are numbers, of which no further derivative is known.

    Raises:
        UnsupportedRequestError: always.
    """
    raise UnsupportedRequestError(
        "a second derivative is wanted of attention whose gradient a kernel computed, and no kernel brings more than "
        'the first. Make the call with backend="reference", which autograd can differentiate any number of times'
    )


def differentiable(bound: Bound, return_lse: bool, head_axis: int = 1) -> Callable[..., Any]:
    """A forward that autograd can go through, from a backend's (forward, backward) pair.

    Args:
        bound: with a backward; its forward returns (out, lse).
        return_lse: whether the caller gets the LSE, differentiable like the output.
        head_axis: axis of H_q in the LSE: 1 for [B, H_q, S_q] and [T, H_q], 2 for [B, S_q, H_q].

    Raises:
        UnsupportedRequestError: in the backward, when its gradients are batched, or differentiated again.
    """

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        **extra: Any,
    ) -> Any:
        apply: Callable[..., tuple[Tensor, Tensor]] = _Attention.apply
        result = apply(bound, head_axis, extra, query, key, value, sinks)
        return result if return_lse else result[0]

    return forward


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record gradients, also in the body of a custom op, which runs below autograd: there `torch.enable_grad` alone
    records nothing, without a sign."""
    with contextlib.ExitStack() as stack:
        for name in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(getattr(torch._C.DispatchKey, name), False))
        stack.enter_context(torch.enable_grad())
        yield


def recomputed_backward(forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """A backward as `polyattn.contract.DenseBackward`, for a forward through whose output and LSE autograd goes.

    The forward is run again. Let it give (o, l), and let (out, lse) belong to the merged result: the part has the
    weight w = exp(l - lse) in it, so the gradient of o is w * dout, and that of l is w * rowsum(dout * (o - out)). For
    a call that is the whole, w = 1 and the second is 0.

    Raises:
        PluginError: in the backward, when the LSE that comes back has no gradient.
    """

    def backward(
        dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **extra: Any
    ) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        with recording():
            own, own_lse = forward(*leaves, **extra)
        if not own.requires_grad:  # no query or no key: nothing depends on anything
            return tuple(torch.zeros_like(leaf, requires_grad=False) for leaf in leaves)
        if not own_lse.requires_grad:
            raise PluginError(
                "a backend declares grad lse, and its forward gives an LSE without a gradient, which a part of a "
                "merged result needs; its capability row must leave `lse` out of `grad`"
            )
        with torch.no_grad():
            # Rows that see no key here have no weight, also where the whole is empty: exp(-inf + inf) would be NaN.
            empty = own_lse == float("-inf")
            weight = torch.exp(own_lse.masked_fill(empty, 0.0) - lse.masked_fill(empty, 0.0)).masked_fill(empty, 0.0)
            wide = dout.to(own_lse.dtype)
            through_lse = weight * (wide * (own.to(wide.dtype) - out.to(wide.dtype))).sum(-1)
            through_out = (wide * weight[..., None]).to(own.dtype)
        grads = torch.autograd.grad([own, own_lse], leaves, [through_out, through_lse], allow_unused=True)
        return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(grads, (query, key, value), strict=True))

    return backward
