"""FlashAttention 2: `flash_attn.flash_attn_interface`, Ampere and later.

From its source (csrc/flash_attn/flash_api.cpp): pages of a multiple of 256 tokens; a row without keys has LSE = +inf;
softcap excludes dropout; keys are split among the chip only by `flash_attn_with_kvcache`, whose queries are one length
for all; with one query each, the packed call takes the queries for [N, H_q, D]. Windows are not S4's before the first
key (mha_fwd, set_params_fprop): see `FA2_WINDOWS`. Over pages a packed call writes the LSE of a block of queries that
sees no key to where it would be in a batch of one length, behind its tensor as well (flash-attention#2842): no packed
call here has such a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import (
    OutAndLSE,
    Packed,
    bind_dropout,
    bind_flash_attention,
    give_padding_a_key,
    load,
    padding_query_mask,
)
from polyattn.contract import AttentionRequest, Bound, PagedTables
from polyattn.semantics.packed import per_token

from ..records.common import FLASH_ATTN_2

__all__ = ["FlashAttention2"]

_MODULE = "flash_attn.flash_attn_interface"


class FlashAttention2:
    """Binds dense, varlen and paged requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed version lacks what the request needs.
        """
        if request.dropout:
            return _dropping(request)
        return bind_flash_attention(request, _Kernels)


def _load(name: str, needs: dict[str, str] | None = None) -> Callable[..., Any]:
    return load(FLASH_ATTN_2, f"{_MODULE}:{name}", needs)


def _options(request: AttentionRequest) -> dict[str, Any]:
    """What forward and backward are told alike."""
    return {
        "softmax_scale": request.softmax_scale,
        "causal": request.causal != "none",
        "softcap": request.softcap,
    }


class _Kernels:
    empty = torch.inf
    writes_out = False

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        self._options = _options(request)
        given = {**self._options, "window_size": request.window}
        self.simple: Callable[..., Tensor] | None = None
        if request.family == "dense":
            self._dense = self.simple = functools.partial(_load("flash_attn_func"), **given)
        else:
            self._packed = functools.partial(_load("flash_attn_varlen_func", {"block_table": "a page table"}), **given)
        if request.family == "paged":
            self._cached = functools.partial(_load("flash_attn_with_kvcache"), **given)
        if request.grad:
            name = "_flash_attn_backward" if request.family == "dense" else "_flash_attn_varlen_backward"
            self._backward = _load(name, {"window_size_left": "the backward"})

    def takes_sinks(self, sinks: Tensor, query: Tensor) -> bool:
        return False

    def dense(self, query: Tensor, key: Tensor, value: Tensor, *, lse: bool) -> OutAndLSE:
        result = self._dense(query, key, value, return_attn_probs=lse)
        return (result[0], result[1]) if lse else (result, None)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, where: Packed, *, lse: bool, **table: Any) -> OutAndLSE:
        if where.max_seqlen_q == 1 and query.shape[0] != where.cu_seqlens_q.shape[0] - 1:
            # Some sequence has no query.
            where = where._replace(max_seqlen_q=2)
        result = self._packed(query, key, value, **where._asdict(), **table, return_attn_probs=lse)
        return (result[0], result[1]) if lse else (result, None)

    def paged(self, query: Tensor, key: Tensor, value: Tensor, where: PagedTables, *, lse: bool) -> OutAndLSE:
        table, seq_lens, starts, longest_q, longest_k = where[:5]
        if longest_q == 1:
            if query.shape[0] != seq_lens.shape[0]:
                table, seq_lens = per_token(query.shape[0], starts, table, seq_lens)
            tables = {"cache_seqlens": seq_lens, "block_table": table}
            result = self._cached(query.unsqueeze(1), key, value, **tables, return_softmax_lse=lse)
            return (result[0].squeeze(1), result[1].squeeze(2).transpose(0, 1)) if lse else (result.squeeze(1), None)
        filled = give_padding_a_key(where, self.request.page_size)
        # How many keys there are it reads from where they would start, if they were packed.
        ends = torch.nn.functional.pad(filled.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        packed = Packed(starts, ends, longest_q, max(longest_k, longest_q))
        result, found = self.packed(query, key, value, packed, lse=lse, block_table=filled.page_table)
        padding = padding_query_mask(query.shape[0], where)
        result = result.masked_fill_(padding[:, None, None], 0.0)
        return result, None if found is None else found.masked_fill_(padding, self.empty)

    def gradient(self, *tensors: Tensor, where: Packed | None) -> tuple[Tensor, Tensor, Tensor]:
        dout, query, key, value, out, lse = tensors
        left, right = self.request.window
        dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
        self._backward(
            dout=dout, q=query, k=key, v=value, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv,
            **({} if where is None else where._asdict()),
            **self._options, window_size_left=left, window_size_right=right,
            dropout_p=0.0, alibi_slopes=None, deterministic=self.request.deterministic,
        )  # fmt: skip
        return dq, dk, dv


def _dropping(request: AttentionRequest) -> Bound:
    """With dropout, whose random state only the library's own autograd knows. No LSE, no softcap."""
    given = {
        **{name: value for name, value in _options(request).items() if name != "softcap"},
        "window_size": request.window,
        "dropout_p": request.dropout,
        "deterministic": request.deterministic,
    }
    name = "flash_attn_func" if request.family == "dense" else "flash_attn_varlen_func"
    return bind_dropout(request, functools.partial(_load(name), **given))
