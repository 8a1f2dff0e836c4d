"""torch's `varlen_attn` with a page table: FlashAttention-2 that reads the pages where they are (CUDA, torch 2.12).

From its kernel's own checks: float16 and bfloat16, K and V of one width, a multiple of 8 up to 256, pages of a multiple
of 256 tokens, compute capability 8.0. Its LSE is [H_q, T_q], with +inf for a query without keys; that of a block of
queries without any is written to where it would be in a batch of one length, behind its tensor as well
(flash-attention#2842), so there is no such block here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from ..adapters import (
    align16,
    append_new_kv,
    empty_result,
    finish_output,
    give_padding_a_key,
    padding_query_mask,
    with_positive_scale,
)
from ..contract import AttentionRequest, Bound, PagedTables

__all__ = ["PagedVarlenAttn"]


class PagedVarlenAttn:
    """Binds paged requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        return with_positive_scale(request, lambda positive: Bound(functools.partial(_forward, positive)))


def _forward(
    request: AttentionRequest,
    query: Tensor,
    *caches: Tensor,
    tables: PagedTables,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: None = None,
    sinks: Tensor | None = None,
    k_scale: None = None,
    v_scale: None = None,
    out: Tensor | None = None,
) -> Any:
    if not (query.shape[0] and tables.max_seqlen_k):
        return empty_result(request, query, out)
    if key is not None:
        caches, tables = append_new_kv(request, query, caches, tables, key, value)
    keys, values = (cache.transpose(1, 2) if request.kv_layout == "HND" else cache for cache in caches)
    # With one query each, it takes the queries for [N, H_q, D]: not where a sequence has none.
    max_seqlen_q, sequences = tables.max_seqlen_q, tables.seq_lens.shape[0]
    longest = max_seqlen_q if max_seqlen_q > 1 or query.shape[0] == sequences else 2
    filled = give_padding_a_key(tables, request.page_size)
    window = (request.window[0], 0 if request.causal != "none" else request.window[1])
    result, lse = varlen.varlen_attn(
        align16(query),
        keys,
        values,
        tables.cu_seqlens_q,
        _starts(filled.seq_lens),
        longest,
        max(tables.max_seqlen_k, max_seqlen_q),
        return_aux=varlen.AuxRequest(lse=True),
        scale=request.scale,
        window_size=window,
        enable_gqa=request.group != 1,
        seqused_k=filled.seq_lens,
        block_table=filled.page_table,
        num_splits=1 if request.batch_invariant else None,
    )
    padding = padding_query_mask(query.shape[0], tables)
    result = result.masked_fill(padding[:, None, None], 0.0)
    return finish_output(request, result, lse.transpose(0, 1).masked_fill(padding[:, None], -torch.inf), sinks, out)


def _starts(seq_lens: Tensor) -> Tensor | None:
    """Return where keys would start if they were packed. FlashAttention-2 checks it and reads `seqused_k` instead; the
    kernels that `activate_flash_attention_impl` puts in its place refuse it beside a page table."""
    if torch.nn.attention.current_flash_attention_impl() is not None:
        return None
    return torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
