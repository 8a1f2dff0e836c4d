"""Adapter of the dense and packed kernels: a request becomes what a launch needs, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Bound
from polyattn_triton import runtime
from polyattn_triton.hopper import backward as hopper_backward
from polyattn_triton.hopper import extend as hopper_extend
from polyattn_triton.hopper import forward as hopper
from polyattn_triton.kernels.backward import backward
from polyattn_triton.kernels.forward import Config, forward
from polyattn_triton.kernels.rules import bounds
from polyattn_triton.kernels.tiles import Spec

__all__ = ["Dense"]

_NARROW = 64
_BRIEF = {3: Config(64, 128, 4, 2, tma=True), 4: Config(64, 64, 4, 2, tma=True)}
"""Head dims up to which, and how, the portable kernel serves on a Hopper what leaves a processor so few of its tiles
or fewer: they run side by side, where the Hopper kernel's, of three times the rows, wait for one another. On an H200 24
sequences of 300 with 4 heads take 13 us, and took 18."""


class Dense:
    """Binds families `dense` and `varlen`."""

    def bind(self, request: AttentionRequest) -> Bound:
        if request.platform == "cpu":
            runtime.check_device(torch.device("cpu"))
        spec, layout = _spec(request), "THD" if request.family == "varlen" else request.layout
        attend = functools.partial(forward, spec=spec, layout=layout)
        dtype, masked = getattr(torch, request.dtype), request.mask != "none"
        if request.platform == "cuda" and hopper.takes(dtype, *request.dims, spec=spec, layout=layout, masked=masked):
            brief = max(request.dims) <= _NARROW and not request.batch_invariant
            attend = _on_hopper(spec, layout, brief=brief)
        elif request.platform == "cuda" and request.family == "varlen" and hopper_extend.takes_packed(request):
            attend = _packed_on_hopper(spec)
        differentiate = functools.partial(backward, spec=spec, layout=layout)
        taken = hopper_backward.takes(dtype, *request.dims, spec=spec, layout=layout, masked=masked)
        if request.platform == "cuda" and taken and not (request.deterministic or request.batch_invariant):
            differentiate = _gradients_on_hopper(spec, layout)
        return _bound(request, attend, differentiate)


def _spec(request: AttentionRequest) -> Spec:
    left, right = bounds(request.causal != "none", request.window, request.chunk)
    return Spec(
        scale=request.softmax_scale,
        softcap=request.softcap,
        left=left,
        right=right,
        chunk=request.chunk,
        top_left=request.causal == "top_left",
    )


def _on_hopper(spec: Spec, layout: str, *, brief: bool) -> Callable[..., None]:
    """The Hopper kernel where it can be given the tensors, else the portable one; that one too, where it may be
    `brief`, for few tiles."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None, sinks: Tensor | None = None,
        attn_mask: None = None,
    ) -> None:  # fmt: skip
        given: dict[str, Any] = {"spec": spec, "layout": layout, "sinks": sinks}
        if not hopper.fits(query, key, value, out, spec=spec, layout=layout):
            forward(query, key, value, out, lse, **given)
        elif brief and (config := _few_tiles(query, layout)) is not None:
            forward(query, key, value, out, lse, **given, config=config)
        else:
            hopper.forward(query, key, value, out, lse, **given)

    return attend


def _few_tiles(query: Tensor, layout: str) -> Config | None:
    """How the portable kernel computes a call of few tiles; None: it has more of them."""
    batch, rows, heads, _ = query.shape if layout == "BSHD" else query.transpose(1, 2).shape
    tiles = batch * heads * -(-rows // 64)
    return _BRIEF.get(max(-(-tiles // runtime.processors(query.device)), 3))


def _packed_on_hopper(spec: Spec) -> Callable[..., None]:
    """As `_on_hopper`, for packed calls."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None, *, sinks: Tensor | None = None,
        attn_mask: None = None, **lengths: Any,
    ) -> None:  # fmt: skip
        if hopper_extend.fits_packed(query, key, value, out, lengths["max_seqlen_q"]):
            del lengths["max_seqlen_k"]
            hopper_extend.packed(
                query, key, value, causal=spec.right >= 0, left=spec.left, scale=spec.scale, sinks=sinks, out=out,
                lse=lse, **lengths,
            )  # fmt: skip
        else:
            forward(query, key, value, out, lse, spec=spec, layout="THD", sinks=sinks, **lengths)

    return attend


def _gradients_on_hopper(spec: Spec, layout: str) -> Callable[..., tuple[Tensor, ...]]:
    """As `_on_hopper`, for gradients."""

    def differentiate(
        dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, attn_mask: None = None
    ) -> tuple[Tensor, ...]:
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        fits = hopper_backward.fits(query, key, value, dout, spec=spec, layout=layout)
        return (hopper_backward.backward if fits else backward)(
            dout, query, key, value, out, lse, spec=spec, layout=layout
        )

    return differentiate


def _bound(
    request: AttentionRequest, attend: Callable[..., None], differentiate: Callable[..., tuple[Tensor, ...]]
) -> Bound:
    """`attend` and `differentiate` as calls of the contract; what else they are given goes to the kernels as it is:
    attn_mask, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k."""
    width, with_lse = request.dims[1], request.lse or bool(request.grad)

    def room(query: Tensor) -> Tensor:
        """Memory for an output, laid out as the query."""
        return torch.empty_like(query) if query.shape[-1] == width else query.new_empty((*query.shape[:-1], width))

    def call(query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None, **given: Any) -> Any:
        if out is None:
            out = room(query)
        if given.get("sinks") is not None:
            given["sinks"] = given["sinks"].contiguous()
        lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device) if with_lse else None
        attend(query, key, value, out, lse, **given)
        return (out, lse) if with_lse else out

    def simple(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = room(query)
        attend(query, key, value, out, None)
        return out

    plain = request.family == "dense" and not with_lse
    return Bound(call, differentiate if request.grad else None, simple=simple if plain else None)
