"""Family `paged` by HPC-Ops on Hopper: bfloat16, D = 128, pages of 64, scaled by D ** -0.5.

From its sources: lengths count the new tokens too; prefill is causal from the lower right corner; decode takes one
query for each sequence; layouts are strides; there is no LSE. Both multiply the free slots of a sequence's last page by
0, so these must hold finite numbers. A cache may hold anything there (S9), so its pages are copied without them, unless
the option `free_slots` promises otherwise: then they are read where they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polyattn.adapters import load
from polyattn.backends.free_slots import without_free_slots
from polyattn.backends.gathering import nothing
from polyattn.backends.padding_rows import blank
from polyattn.backends.paged_varlen_attn import with_new
from polyattn.contract import Bound
from polyattn.packing import per_token
from polyattn.placement import placed
from polyattn.records import AttentionRequest

from .records.serving import HPC_OPS_PACKAGE

__all__ = ["HpcOps"]

_DECODE = ("q", "kcache", "vcache", "block_ids", "num_seq_kvcache", "new_kv_included", "output")
_PREFILL = ("q", "kcache", "vcache", "cu_seqlens_q", "block_ids", "seqlens_kvcache", "max_seqlens_q", "output")


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
            page_table: Tensor,
            seq_lens: Tensor,
            cu_seqlens_q: Tensor,
            max_seqlen_q: int,
            max_seqlen_k: int,
            key: Tensor | None = None,
            value: Tensor | None = None,
            out: Tensor | None = None,
            **_: None,
        ) -> Any:
            if not (query.shape[0] and max_seqlen_k):
                return nothing(request, query, out)
            if key is not None:
                caches, page_table = with_new(
                    request, query, caches, page_table, seq_lens, cu_seqlens_q, max_seqlen_k, key, value
                )
            # Its prefill reads both as they lie in memory, whatever their strides.
            seq_lens, cu_seqlens_q = seq_lens.contiguous(), cu_seqlens_q.contiguous()
            if decode and query.shape[0] != seq_lens.shape[0]:
                page_table, seq_lens = per_token(query.shape[0], cu_seqlens_q, page_table, seq_lens)
            if not finite:
                caches, page_table = without_free_slots(request, caches, page_table, seq_lens, max_seqlen_k)
            keys, values = (cache.transpose(1, 2) if request.kv_layout == "HND" else cache for cache in caches)
            given = {
                "q": placed(query.contiguous()),
                "kcache": keys,
                "vcache": values,
                "block_ids": page_table.contiguous(),
                "output": out if out is not None and out.is_contiguous() else None,
            }
            if decode:
                result = kernel(num_seq_kvcache=seq_lens, new_kv_included=True, **given)
                # A padding row has no keys to divide by.
                result = result.masked_fill_((seq_lens == 0)[:, None, None], 0.0)
            else:
                result = kernel(
                    cu_seqlens_q=cu_seqlens_q, seqlens_kvcache=seq_lens, max_seqlens_q=max_seqlen_q, **given
                )
                # Nor has one in a prefill, whose softmax takes -inf from -inf.
                result = result.masked_fill_(blank(query.shape[0], seq_lens, cu_seqlens_q)[:, None, None], 0.0)
            return result if out is None or result is out else out.copy_(result)

        return Bound(forward)
