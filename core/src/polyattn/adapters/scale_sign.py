"""Scales that are zero or negative, for kernels that multiply by a positive scale only (S2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..contract import AttentionRequest, Bound

__all__ = ["with_positive_scale"]


def with_positive_scale(request: AttentionRequest, bind: Callable[[AttentionRequest], Bound]) -> Bound:
    """Bind a request with a scale of 0 or below by a kernel that takes positive scales only (S2).

    The queries take the sign instead, which rounds nothing. Kernels that scale after their causal mask, or that take
    the largest logit before they scale, give NaN for scale <= 0.

    Args:
        request: of any scale. bind: binds a request whose scale is None or above 0.
    """
    if request.scale is None or request.scale > 0:
        return bind(request)
    sign = -1.0 if request.scale < 0 else 0.0
    bound = bind(dataclasses.replace(request, scale=-request.scale if sign else None))

    def forward(query: Tensor, *tensors: Tensor, **kw: Any) -> Any:
        return bound.forward(query * sign, *tensors, **kw)

    if bound.backward is None:
        return Bound(forward, traceable=bound.traceable)
    kernel = bound.backward

    def backward(dout: Tensor, query: Tensor, *tensors: Tensor, **kw: Any) -> tuple[Tensor, Tensor, Tensor]:
        dquery, dkey, dvalue = kernel(dout, query * sign, *tensors, **kw)
        return dquery * sign, dkey, dvalue

    return Bound(forward, backward, bound.traceable, exportable=bound.exportable)
