"""FlashAttention 4: `flash_attn.cute.interface`, compiled at the first call of a kind, from Ampere to Blackwell.

Called are the forward and the backward that its public functions, autograd functions around the two, call themselves:
autograd is polyattn's here, and a second one would cost every call microseconds.

From its source: a window is off by None, not by -1; the forward returns (out, lse or None, ...); sinks of any floating
dtype are taken as they are, and are then part of the LSE; pages exclude cu_seqlens_k; the latent of absorbed MLA goes
in as `qv` on Blackwell, and its LSE then has the heads last.

A page that is a tile of keys, 128 of them, is loaded whole by TMA, with the rows behind a sequence's last token; these
get weights of 0, and "must be finite" (flash_attn_varlen_func), which a cache need not be there (S9). So such pages are
given to it as smaller ones, whose rows are loaded one by one, unless the option `free_slots` promises finite numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import OutAndLSE, Packed, bind_flash_attention, cut_pages, load, uniform_cu_seqlens
from polyattn.contract import AttentionRequest, Bound, PagedTables

from ..records.common import FLASH_ATTN_4

__all__ = ["FlashAttention4"]

_MODULE = "flash_attn.cute.interface"
_TILE, _PART = 128, 32
"""Keys of a tile, and of the pages that one is cut into: fewer than any tile has."""
_SINKS = (torch.float16, torch.bfloat16, torch.float32)


class FlashAttention4:
    """Binds dense, varlen, paged and mla requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed version lacks what the request needs.
        """
        return bind_flash_attention(request, _Kernels)


def _load(name: str, needs: dict[str, str] | None = None) -> Callable[..., Any]:
    return load(FLASH_ATTN_4, f"{_MODULE}:{name}", needs)


class _Kernels:
    empty = -torch.inf
    writes_out = False

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        left, right = (None if bound < 0 else bound for bound in request.window)
        self._options: dict[str, Any] = {
            "softmax_scale": request.softmax_scale,
            "causal": request.causal != "none",
            "softcap": request.softcap,
            "window_size_left": left,
            "window_size_right": right,
        }
        finite = dict(request.options).get("free_slots", "any") == "finite"
        whole = request.page_size == _TILE
        self._cut, self._spared = whole and not finite, whole and finite and request.arch == "sm90"
        self._alone = request.family == "paged" and not request.batch_invariant
        needs = {"qv": "a latent cache"} if request.family == "mla" else {}
        forward = self._forward = functools.partial(_load("_flash_attn_fwd", needs), **self._options)
        self.simple: Callable[..., Tensor] | None = None
        if request.family == "dense":
            self.simple = lambda query, key, value: forward(query, key, value)[0]
        if request.grad:
            bounds = dict.fromkeys(("window_size_left", "window_size_right"), "the backward")
            self._backward = _load("_flash_attn_bwd", bounds)

    def takes_sinks(self, sinks: Tensor, query: Tensor) -> bool:
        return sinks.dtype in _SINKS

    def dense(self, query: Tensor, key: Tensor, value: Tensor, *, lse: bool, sinks: Tensor | None = None) -> OutAndLSE:
        out, found, *_ = self._forward(query, key, value, learnable_sink=sinks, return_lse=lse)
        return out, found

    def packed(
        self, query: Tensor, key: Tensor, value: Tensor, where: Packed, *, lse: bool, sinks: Tensor | None = None
    ) -> OutAndLSE:
        out, found, *_ = self._forward(query, key, value, **where._asdict(), learnable_sink=sinks, return_lse=lse)
        return out, found

    def paged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        where: PagedTables,
        *,
        lse: bool,
        sinks: Tensor | None = None,
        **latent: Tensor,
    ) -> OutAndLSE:
        table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = where[:5]
        if self._cut:
            cut, step = cut_pages({"key": key, "value": value}, _TILE, _PART)
            key, value = cut["key"], cut["value"]
            parts = uniform_cu_seqlens(self.request, _TILE // _PART - 1, 1, table.device)  # 0, 1, 2 ...
            table = torch.add(parts, table.unsqueeze(-1), alpha=step).flatten(1)
        elif self._spared:
            # For queries that see no key Hopper's TMA asks the table for the page of a tile before the first
            # (flash_fwd_sm90.py, n_block_max - 1). Whatever it finds is in bounds for TMA, and weighted by 0; so there
            # only has to be something. Serving's tables have room in front.
            before = max_seqlen_q // _TILE + 1
            if table.storage_offset() < before:
                table = torch.nn.functional.pad(table, (before, 0))[:, before:]
        given = {"page_table": table, "seqused_k": seq_lens, "max_seqlen_k": max_seqlen_k, **latent}
        if max_seqlen_q == 1 and query.shape[0] == seq_lens.shape[0] and self._alone:
            # Nothing has to be looked up to know whose query it is. Other bits, maybe: not where they must not differ
            # from those beside a sequence without a query.
            single = query.unsqueeze(1)
            out, found, *_ = self._forward(single, key, value, **given, learnable_sink=sinks, return_lse=lse)
            return out.squeeze(1), None if found is None else found.squeeze(2).transpose(0, 1)
        out, found, *_ = self._forward(
            query, key, value, **given, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            learnable_sink=sinks, return_lse=lse,
        )  # fmt: skip
        return out, found

    def latent(self, query: Tensor, cache: Tensor, where: PagedTables, *, lse: bool) -> OutAndLSE:
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
            **self._options, deterministic=self.request.deterministic,
        )  # fmt: skip
        return dq, dk, dv
