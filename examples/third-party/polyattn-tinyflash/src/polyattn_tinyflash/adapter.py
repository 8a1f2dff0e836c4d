"""From polyattn's requests to the kernel's two operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Bound

from .build import kernel

__all__ = ["TinyFlash"]


class TinyFlash:
    """Binds dense and varlen requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        op = kernel()
        scale = request.softmax_scale
        left, right = request.window
        if request.causal == "bottom_right":
            right = 0
        rule = (scale, request.softcap, left, right)
        own_threads = dict(request.options).get("threads")
        with_lse = request.lse or bool(request.grad)
        view = _views(request)

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            cu_seqlens_q: Tensor | None = None,
            cu_seqlens_k: Tensor | None = None,
            max_seqlen_q: int = 0,
            max_seqlen_k: int = 0,
            attn_mask: None = None,
            sinks: None = None,
            out: Tensor | None = None,
        ) -> Any:
            q, k, v = view(query), view(key), view(value)
            # In the caller's layout, so that what is returned has the strides that a caller expects.
            out = query.new_empty((*query.shape[:-1], value.shape[-1])) if out is None else out
            lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
            starts = (_ints(cu_seqlens_q), _ints(cu_seqlens_k))
            op.forward(q, k, v, view(out), view(lse), *starts, *rule, own_threads or torch.get_num_threads())
            return (out, lse) if with_lse else out

        def backward(
            dout: Tensor,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            out: Tensor,
            lse: Tensor,
            *,
            cu_seqlens_q: Tensor | None = None,
            cu_seqlens_k: Tensor | None = None,
            max_seqlen_q: int = 0,
            max_seqlen_k: int = 0,
            attn_mask: None = None,
        ) -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
            given = [view(_dense(t)) for t in (dout, query, key, value, out)]
            starts = (_ints(cu_seqlens_q), _ints(cu_seqlens_k))
            threads = own_threads or torch.get_num_threads()
            op.backward(*given, view(lse), view(dq), view(dk), view(dv), *starts, *rule, threads)
            return dq, dk, dv

        return Bound(forward, backward)


def _views(request: AttentionRequest) -> Callable[[Tensor], Tensor]:
    """The kernel's one layout, [B, S, H, ...]; a packed batch is one long sample."""
    if request.family == "varlen":
        return lambda tensor: tensor.unsqueeze(0)
    if request.layout == "BHSD":
        return lambda tensor: tensor.transpose(1, 2)
    return lambda tensor: tensor


def _ints(starts: Tensor | None) -> Tensor | None:
    return None if starts is None else starts.contiguous()


def _dense(tensor: Tensor) -> Tensor:
    """With a dense last axis, which the gradient of e.g. `out.sum()` lacks: it is one number, expanded."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
