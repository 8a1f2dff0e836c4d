"""This module has the tensor code that lowerings share: a kernel's functions with its inputs and outputs on other
routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..contract import AttentionRequest, Bound
from .lengths import check_size

__all__ = ["Route", "adapt", "columns", "deliver", "gives_lse"]


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclasses.dataclass(frozen=True)
class Route:
    """How a tensor of the request becomes the kernel's (`there`) and the kernel's becomes the request's (`back`).

    For an input, `back` takes the gradient: it is the transpose of `there`.

    Attributes:
        view: `there` gives the whole tensor as a view, so that an output given can be written through it.
    """

    there: Callable[[Tensor], Tensor] = _same
    back: Callable[[Tensor], Tensor] = _same
    view: bool = False


SAME = Route(view=True)


def columns(request: AttentionRequest, width: int, wide: int) -> Route:
    """Tensors of `width` columns with zeros up to `wide`, and without them again."""
    what = f"padding {width} columns to {wide}"

    def pad(tensor: Tensor) -> Tensor:
        check_size(request, what, tensor.numel() // width * wide)
        # Padding may keep an order of axes in which the last one is not dense.
        return F.pad(tensor, (0, wide - width)).contiguous()

    def crop(tensor: Tensor) -> Tensor:
        return tensor[..., :width]

    return Route(pad, crop)


def gives_lse(request: AttentionRequest, bound: Bound) -> bool:
    """Return whether a bound forward returns (out, lse): because it is asked for, or because its backward needs it."""
    return request.lse or (bound.backward is not None and bool(request.grad))


def deliver(result: Any, out: Tensor | None) -> Any:
    """`result`, an output or (output, lse), with the output in `out` where one is given."""
    if out is None:
        return result
    if isinstance(result, tuple):
        return (out.copy_(result[0]), *result[1:])
    return out.copy_(result)


def adapt(
    inner: Bound,
    *,
    query: Route = SAME,
    key: Route = SAME,
    value: Route = SAME,
    out: Route = SAME,
    lse: Route = SAME,
    extra: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: given,
) -> Bound:
    """A kernel with its tensors on other routes, forward and backward.

    Args:
        inner: the kernel's functions.
        query, key, value: of the inputs and their gradients, or of the query and the caches. out: of the output, and of
            its gradient. lse: of the LSE.
        extra: of the keyword arguments that are neither (attn_mask, sinks, cu_seqlens_q ...), by name.
    """
    routes = out

    def forward(*tensors: Tensor, out: Tensor | None = None, **given: Any) -> Any:
        given = dict(extra(given))
        if out is not None and routes.view:
            given["out"] = routes.there(out)
        # Of MLA there are two tensors only.
        inputs = (route.there(tensor) for route, tensor in zip((query, key, value), tensors, strict=False))
        result = inner.forward(*inputs, **given)
        if isinstance(result, tuple):
            result = (routes.back(result[0]), lse.back(result[1]))
        else:
            result = routes.back(result)
        if out is not None and routes.view:
            return (out, *result[1:]) if isinstance(result, tuple) else out
        return deliver(result, out)

    if inner.backward is None:
        return Bound(forward, traceable=inner.traceable)
    kernel = inner.backward

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, softmax: Tensor, **given: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = kernel(
            *(out.there(dout), query.there(q), key.there(k), value.there(v), out.there(result), lse.there(softmax)),
            **extra(given),
        )
        return query.back(dq), key.back(dk), value.back(dv)

    return Bound(forward, backward, inner.traceable, exportable=inner.exportable)
