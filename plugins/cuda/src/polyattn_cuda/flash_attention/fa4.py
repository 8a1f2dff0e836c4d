"""FlashAttention 4: `flash_attn.cute.interface`, compiled at the first call of a kind, from Ampere to Blackwell.

From its source: a window is off by None, not by -1; every call returns (out, lse or None); sinks of any floating dtype
are taken as they are, and are then part of the LSE; pages exclude cu_seqlens_k; the latent of absorbed MLA goes in as
`qv` on Blackwell, and its LSE then has the heads last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn import adapters
from polyattn.backends.flash_attention import Packed, Result, Tables, bind
from polyattn.contract import Bound
from polyattn.records import AttentionRequest

from ..records.common import FLASH_ATTN_4

__all__ = ["FlashAttention4"]

_MODULE = "flash_attn.cute.interface"
_SINKS = (torch.float16, torch.bfloat16, torch.float32)


class FlashAttention4:
    """Binds dense, varlen, paged and mla requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed version lacks what the request needs.
        """
        return bind(request, _Kernels)


def _load(name: str, needs: dict[str, str] | None = None) -> Callable[..., Any]:
    return adapters.load(FLASH_ATTN_4, f"{_MODULE}:{name}", needs)


class _Kernels:
    empty = -torch.inf
    writes_out = False
    simple = None

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        left, right = (None if bound < 0 else bound for bound in request.window)
        self.window = {"window_size_left": left, "window_size_right": right}
        self.options: dict[str, Any] = {
            "softmax_scale": request.head_dim**-0.5 if request.scale is None else request.scale,
            "causal": request.causal != "none",
            "softcap": request.softcap,
        }
        given = {**self.options, "window_size": (left, right)}
        if request.family == "dense":
            self._dense = functools.partial(_load("flash_attn_func"), **given)
        else:
            needs = {"qv": "a latent cache"} if request.family == "mla" else {}
            self._packed = functools.partial(_load("flash_attn_varlen_func", needs), **given)
        if request.grad:
            self._backward = _load("_flash_attn_bwd", dict.fromkeys(self.window, "the backward"))

    def fuses(self, sinks: Tensor, query: Tensor) -> bool:
        return sinks.dtype in _SINKS

    def dense(self, query: Tensor, key: Tensor, value: Tensor, *, lse: bool, sinks: Tensor | None = None) -> Result:
        result: Result = self._dense(query, key, value, learnable_sink=sinks, return_lse=lse)
        return result

    def packed(
        self, query: Tensor, key: Tensor, value: Tensor, where: Packed, *, lse: bool, sinks: Tensor | None = None
    ) -> Result:
        result: Result = self._packed(query, key, value, **where._asdict(), learnable_sink=sinks, return_lse=lse)
        return result

    def paged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        where: Tables,
        *,
        lse: bool,
        sinks: Tensor | None = None,
        **latent: Tensor,
    ) -> Result:
        table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = where
        result: Result = self._packed(
            query, key, value, page_table=table, seqused_k=seq_lens, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, learnable_sink=sinks, return_lse=lse, **latent,
        )  # fmt: skip
        return result

    def latent(self, query: Tensor, cache: Tensor, where: Tables, *, lse: bool) -> Result:
        width = self.request.dims[1]
        values = cache[..., :width]
        if width < 512:
            return self.paged(query, cache, values, where, lse=lse)
        rotary, absorbed = query[..., width:], query[..., :width]
        result, found = self.paged(rotary, cache[..., width:], values, where, lse=lse, qv=absorbed)
        return result, None if found is None else found.transpose(0, 1)

    def gradient(self, *tensors: Tensor, where: Packed | None) -> tuple[Tensor, Tensor, Tensor]:
        dout, query, key, value, out, lse = tensors
        dq, dk, dv = self._backward(
            q=query, k=key, v=value, out=out, dout=dout, lse=lse,
            **({} if where is None else where._asdict()),
            **self.options, **self.window, deterministic=self.request.deterministic,
        )  # fmt: skip
        return dq, dk, dv
