"""Family `paged` by HPC-Ops on Hopper: bfloat16, D = 128, pages of 64, scaled by D ** -0.5.

From its sources: lengths count the new tokens too; prefill is causal from the lower right corner; decode takes one
query for each sequence; layouts are strides; there is no LSE. Both multiply the free slots of a sequence's last page by
0, so these must hold finite numbers. A cache may hold anything there (S9), so its pages are copied without them, unless
the option `free_slots` promises otherwise: then they are read where they are.

What it reads and writes by TMA starts at 16 bytes, rows and strides of an axis of one included, and no check of its own
says otherwise. A prefill of many tiles waits for ever for the keys of 128 queries that have none. Tokens are counted in
elements of the queries, in 32 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import (
    append_new_kv,
    empty_result,
    give_padding_a_key,
    load,
    padding_query_mask,
    without_free_slots,
)
from polyattn.contract import AttentionRequest, Bound, PagedTables, UnsupportedRequestError
from polyattn.semantics.packed import per_token

from .records.serving import HPC_OPS_PACKAGE
from .tma import by_tma, for_tma

__all__ = ["HpcOps"]

_DECODE = ("q", "kcache", "vcache", "block_ids", "num_seq_kvcache", "new_kv_included", "output")
_PREFILL = ("q", "kcache", "vcache", "cu_seqlens_q", "block_ids", "seqlens_kvcache", "max_seqlens_q", "output")

_MOST = 2**31


class HpcOps:
    """Binds paged requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        decode = request.s_relation == "one"
        name, words = (
            ("attention_decode_bf16", _DECODE) if decode else ("attention_with_kvcache_prefill_bf16", _PREFILL)
        )
        kernel = load(HPC_OPS_PACKAGE, f"hpc.attention:{name}", dict.fromkeys(words, "polyattn"))
        finite = dict(request.options).get("free_slots", "any") == "finite"

        def forward(
            query: Tensor,
            *caches: Tensor,
            tables: PagedTables,
            key: Tensor | None = None,
            value: Tensor | None = None,
            out: Tensor | None = None,
            **_: None,
        ) -> Any:
            if query.numel() >= _MOST:
                raise UnsupportedRequestError(
                    f"hpc_ops counts the elements of queries in 32 bits, and {[*query.shape]} has {query.numel()}; "
                    f"plan steps of fewer than {_MOST // query[0].numel()} tokens, or name another backend"
                )
            if not (query.shape[0] and tables.max_seqlen_k):
                return empty_result(request, query, out)
            if key is not None:
                caches, tables = append_new_kv(request, query, caches, tables, key, value)
            # Its prefill reads both as they lie in memory, whatever their strides.
            seq_lens, cu_seqlens_q = tables.seq_lens.contiguous(), tables.cu_seqlens_q.contiguous()
            page_table = tables.page_table
            if decode and query.shape[0] != seq_lens.shape[0]:
                page_table, seq_lens = per_token(query.shape[0], cu_seqlens_q, page_table, seq_lens)
            tables = tables.changed(page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
            if not finite:
                caches, tables = without_free_slots(request, caches, tables)
            caches = tuple(map(for_tma, caches))
            keys, values = (cache.transpose(1, 2) if request.kv_layout == "HND" else cache for cache in caches)
            filled = tables if decode else give_padding_a_key(tables, request.page_size)
            direct = out is not None and out.is_contiguous() and by_tma(out)
            given = {
                "q": for_tma(query.contiguous()),
                "kcache": keys,
                "vcache": values,
                "block_ids": filled.page_table.contiguous(),
                "output": out if direct else None,
            }
            with torch.cuda.device_of(query):  # it launches on the current device
                if decode:
                    result = kernel(num_seq_kvcache=filled.seq_lens, new_kv_included=True, **given)
                else:
                    result = kernel(
                        cu_seqlens_q=cu_seqlens_q, seqlens_kvcache=filled.seq_lens,
                        max_seqlens_q=tables.max_seqlen_q, **given,
                    )  # fmt: skip
            # A padding row has no keys to divide by, or those it was given.
            padding = seq_lens == 0 if decode else padding_query_mask(query.shape[0], tables)
            result.masked_fill_(padding[:, None, None], 0.0)
            return result if out is None or direct else out.copy_(result)

        return Bound(forward)
