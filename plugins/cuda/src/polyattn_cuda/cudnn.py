"""Families `dense` and `varlen` by cuDNN: through its front end's torch ops, and through PyTorch's own (dense).

Both take [B, H, S, D] of any strides with a dense last axis, GQA included, and give the natural-log LSE [B, H, S_q, 1]
before sinks, which are left to the LSE. Their backwards read (out, lse) as they are given them. The front end's causal
mask and windows start at either corner; PyTorch's causal mask at the upper left one.

A window of the front end counts as polyattn's does to the right; to the left it counts the query too. It builds and
runs its graphs on the current device, with the handle of the query's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.adapters import has_low_lse_fault, launch_slices, load, with_aligned_inputs, with_positive_scale
from polyattn.contract import AttentionRequest, Bound

from .devices import current_for
from .records.cudnn import CUDNN_FRONTEND

__all__ = ["Frontend", "Torch"]


class _Kernel(NamedTuple):
    """forward: (q, k, v, **lens) -> (out, LSE or None). backward: (dout, q, k, v, out, LSE, **lens) -> dq, dk, dv."""

    forward: Callable[..., tuple[Tensor, Tensor | None]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class Frontend:
    """Binds requests to the front end."""

    def bind(self, request: AttentionRequest) -> Bound:
        return with_aligned_inputs(with_positive_scale(request, lambda positive: _bound(positive, _frontend(positive))))


class Torch:
    """Binds dense requests to the op behind torch's `SDPBackend.CUDNN_ATTENTION`, which also gives the LSE."""

    def bind(self, request: AttentionRequest) -> Bound:
        return with_aligned_inputs(with_positive_scale(request, lambda positive: _bound(positive, _torch(positive))))


def _bound(request: AttentionRequest, kernel: _Kernel) -> Bound:
    """`kernel` for tensors as the request lays them out."""
    turned = request.layout == "BSHD"
    with_lse = request.lse or bool(request.grad)

    def heads_first(*tensors: Tensor) -> list[Tensor]:
        return [tensor.transpose(1, 2) if turned else tensor for tensor in tensors]

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: None = None,
        sinks: None = None,
        out: Tensor | None = None,
        **lens: Any,
    ) -> Any:
        found, lse = kernel.forward(*heads_first(query, key, value), **lens)
        (result,) = heads_first(found)
        result = result if out is None else out.copy_(result)
        return (result, *heads_first(lse)) if with_lse and lse is not None else result

    def backward(*tensors: Tensor, attn_mask: None = None, **lens: Any) -> tuple[Tensor, ...]:
        """tensors: dout, query, key, value, out, lse."""
        if request.family == "dense" and len(parts := launch_slices(tensors[0].shape[0], request.heads)) > 1:
            # Its backward refuses them at once.
            found = [backward(*(t[some] for t in tensors)) for some in parts]
            return tuple(map(torch.cat, zip(*found, strict=True)))
        given = heads_first(*tensors)
        if request.family == "dense":
            S_q, S_k = given[1].shape[2], given[2].shape[2]
            if S_q == S_k == 1:
                return tuple(heads_first(*_one_key(request, *given)))
            if has_low_lse_fault(S_q, S_k):
                return tuple(heads_first(*_by_flash(request, *given)))
        return tuple(heads_first(*kernel.backward(*given, **lens)))

    return Bound(forward, backward if request.grad else None)


def _one_key(
    request: AttentionRequest, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one query with one key, which no mask hides and cuDNN's backward refuses ("s_q = s_kv = 1 is
    not supported"). All [B, H, 1, D], but lse [B, H_q, 1]."""
    scale = request.softmax_scale
    k, v = (t.float().repeat_interleave(request.group, 1) for t in (key, value))
    q, dout = query.float(), dout.float()
    weight = torch.exp(scale * (q * k).sum(-1) - lse).unsqueeze(-1)
    dlogit = scale * weight * (dout * (v - out.float())).sum(-1, keepdim=True)
    of_heads = (dlogit * q, weight * dout)
    dk, dv = (t.unflatten(1, (-1, request.group)).sum(2) for t in of_heads)
    return (dlogit * k).to(query.dtype), dk.to(query.dtype), dv.to(query.dtype)


def _by_flash(
    request: AttentionRequest, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the FlashAttention 2 that torch brings, where cuDNN's backward gives NaN for a low LSE. All
    [B, H, S, D], but lse [B, H_q, S_q]. It starts causal masks and windows at the lower right corner, as S3 does."""
    left, right = request.window
    # Random state of a dropout that this adapter never asks for.
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, dtype=torch.uint64, device=query.device)
    S_q, S_k = query.shape[2], key.shape[2]
    grads = torch.ops.aten._flash_attention_backward(
        *(tensor.transpose(1, 2) for tensor in (dout, query, key, value, out)),
        lse.contiguous(),
        *(None, None, S_q, S_k, 0.0, request.causal != "none", seed, unused),
        scale=request.softmax_scale,
        window_size_left=left if left >= 0 else None,
        window_size_right=right if right >= 0 else None,
    )
    dquery, dkey, dvalue = (grad.transpose(1, 2) for grad in grads)
    return dquery, dkey, dvalue


def _laid_out_as(query: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` with the strides that PyTorch's forward gives to its output."""
    if tensor.shape == query.shape:
        dense = torch.empty_like(query)
    else:
        outer_first = sorted(range(query.ndim), key=query.stride)[::-1]
        dense = torch.empty_permuted(tensor.shape, outer_first, dtype=query.dtype, device=query.device)
    return tensor if tensor.stride() == dense.stride() else dense.copy_(tensor)


def _torch(request: AttentionRequest) -> _Kernel:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    gradient = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    causal, with_lse = request.causal != "none", request.lse or bool(request.grad)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        found = op(query, key, value, None, with_lse, 0.0, causal, False, scale=request.scale)
        return found[0], found[1].squeeze(-1) if with_lse else None

    def backward(
        dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Random state of a dropout that this adapter never asks for.
        seed = torch.zeros((), dtype=torch.long, device=query.device)
        # PyTorch keeps cuDNN's plans by the layouts of query, key and value alone, and reads the other two by those of
        # the call that a plan was made in: so they always come as its forward lays `out` out.
        grads: tuple[Tensor, Tensor, Tensor] = gradient(
            _laid_out_as(query, dout),
            query,
            key,
            value,
            _laid_out_as(query, out),
            lse.contiguous().unsqueeze(-1),
            *(seed, seed, None, None, None),
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            scale=request.scale,
        )
        return grads

    return _Kernel(forward, backward)


def _band(request: AttentionRequest) -> dict[str, Any]:
    """The position rule of a request in the front end's words."""
    left, right = request.window
    band: dict[str, Any] = {"is_causal": request.causal != "none" or right == 0}
    band |= {"window_left": left + 1 if left >= 0 else -1, "window_right": -1 if band["is_causal"] else right}
    # With as many queries as keys the corners are the same, and more of its engines know the upper left one.
    anchored = request.s_relation != "equal" or request.family == "varlen"
    return {**band, "causal_bottom_right": anchored and any((band["is_causal"], left >= 0, right >= 0))}


def _frontend(request: AttentionRequest) -> _Kernel:
    scale = request.softmax_scale
    band, with_lse = _band(request), request.lse or bool(request.grad)
    packed = request.family == "varlen"
    lens_of = _packed_lens if packed else dict
    given = {"scale": scale, **band, "return_lse": with_lse}
    lengths = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv") if packed else ()
    needs = dict.fromkeys((*given, *lengths), "polyattn")
    sdpa = load(CUDNN_FRONTEND, "cudnn.sdpa.fwd.torch_op:sdpa", needs)

    def forward(query: Tensor, key: Tensor, value: Tensor, **lens: Any) -> tuple[Tensor, Tensor | None]:
        with current_for(query):
            found = sdpa(query, key, value, **given, **lens_of(**lens))
        return (found[0], found[1].squeeze(-1)) if with_lse else (found, None)

    def backward(
        dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **lens: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = _padded(lse, **lens) if packed else lse.contiguous()
        if packed:
            # It sums dQ up in memory of its own, which has room for whole rows, at the offsets that query has (cuDNN 9,
            # on an H200): with other strides it writes behind it.
            query = query.contiguous()
        with current_for(query):
            # Registered by the module that `sdpa` is from.
            grads: tuple[Tensor, Tensor, Tensor] = torch.ops.cudnn.sdpa_bwd(
                dout, query, key, value, out, stats, scale, **band, **lens_of(**lens)
            )
        return grads

    return _Kernel(forward, backward)


_LONGEST = 2
"""The least that a packed batch says of its longest queries: of one query with one key there is no backward."""


def _packed_lens(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> dict[str, Tensor | int]:
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_k,
        "max_seqlen_q": max(max_seqlen_q, _LONGEST),
        "max_seqlen_kv": max(max_seqlen_k, 1),
    }


def _padded(lse: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, **_: Any) -> Tensor:
    """[T_q, H_q] as [N, H_q, max_seqlen_q], which is what its packed backward reads."""
    token = torch.arange(lse.shape[0], device=lse.device, dtype=cu_seqlens_q.dtype)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), token, right=True)
    padded = lse.new_zeros(cu_seqlens_q.shape[0] - 1, max(max_seqlen_q, _LONGEST), lse.shape[1])
    padded[sequence, (token - cu_seqlens_q[sequence]).long()] = lse
    return padded.transpose(1, 2).contiguous()
