"""Adapter of the dense and packed kernels: a request becomes what a launch needs, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.contract import Bound
from polyattn.records import AttentionRequest
from polyattn_triton import runtime
from polyattn_triton.hopper import forward as hopper
from polyattn_triton.kernels.backward import backward
from polyattn_triton.kernels.forward import forward
from polyattn_triton.kernels.tiles import Spec

__all__ = ["Dense"]


class Dense:
    """Binds families `dense` and `varlen`."""

    def bind(self, request: AttentionRequest) -> Bound:
        if request.platform == "cpu":
            runtime.check_device(torch.device("cpu"))
        return _packed(request) if request.family == "varlen" else _dense(request)


def _spec(request: AttentionRequest) -> Spec:
    left, right = request.window
    causal = request.causal != "none" or request.chunk > 0
    return Spec(
        scale=request.head_dim**-0.5 if request.scale is None else request.scale,
        softcap=request.softcap,
        left=left,
        right=0 if causal else right,
        chunk=request.chunk,
        top_left=request.causal == "top_left",
    )


def _room(query: Tensor, width: int) -> Tensor:
    """Memory for an output, laid out as the query."""
    return torch.empty_like(query) if query.shape[-1] == width else query.new_empty((*query.shape[:-1], width))


def _lse_room(query: Tensor) -> Tensor:
    return torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)


def _dense(request: AttentionRequest) -> Bound:
    spec, layout, width = _spec(request), request.layout, request.dims[1]
    with_lse = request.lse or bool(request.grad)
    dtype, masked = getattr(torch, request.dtype), request.mask != "none"
    on_hopper = request.platform == "cuda" and hopper.takes(
        dtype, *request.dims, spec=spec, layout=layout, masked=masked
    )

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        if out is None:
            out = _room(query, width)
        lse = _lse_room(query) if with_lse else None
        if on_hopper and hopper.fits(query, key, value, out, spec=spec, layout=layout):
            hopper.forward(query, key, value, out, lse, spec=spec, layout=layout, sinks=sinks)
        else:
            forward(query, key, value, out, lse, spec=spec, layout=layout, attn_mask=attn_mask, sinks=sinks)
        return (out, lse) if with_lse else out

    def simple(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = _room(query, width)
        if on_hopper and hopper.fits(query, key, value, out, spec=spec, layout=layout):
            hopper.forward(query, key, value, out, spec=spec, layout=layout)
        else:
            forward(query, key, value, out, spec=spec, layout=layout)
        return out

    def gradient(
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backward(dout, query, key, value, out, lse, spec=spec, layout=layout, attn_mask=attn_mask)

    return Bound(call, gradient if request.grad else None, simple=None if with_lse else simple)


def _packed(request: AttentionRequest) -> Bound:
    spec, width = _spec(request), request.dims[1]
    with_lse = request.lse or bool(request.grad)

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        **given: Any,  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, attn_mask
    ) -> Any:
        if out is None:
            out = _room(query, width)
        lse = _lse_room(query) if with_lse else None
        forward(query, key, value, out, lse, spec=spec, layout="THD", sinks=sinks, **given)
        return (out, lse) if with_lse else out

    def gradient(*tensors: Tensor, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
        return backward(*tensors, spec=spec, layout="THD", **given)

    return Bound(call, gradient if request.grad else None)
