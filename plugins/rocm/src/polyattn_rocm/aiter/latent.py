"""Family `mla` by AITER's assembly kernels: absorbed queries over latent rows, in bfloat16.

From its sources (aiter/mla.py, csrc/py_itfs_cu/asm_mla.cu): rows are read by token, so pages of any size are; queries
are contiguous; `mla_decode_fwd` returns (partial results, LSE), writes into `o`, and gives NaN for a sequence without
keys. Its result with one split is written by the first stage in other dtypes and without an LSE: there are always two
splits or more here. `mla_prefill_fwd` takes several queries each, causal from the lower right corner, for 16 and 128
heads, without an LSE; other calls are served one query at a time, each with the keys that it sees.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import empty_result, finish_output, load, with_positive_scale
from polyattn.contract import AttentionRequest, Bound, PagedTables
from polyattn.semantics.paged_kv import Tokens

from ..records.common import AITER, PREFILL_HEADS
from .tokens import token_lists

__all__ = ["bind_latent"]

_LISTS = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q")
_MOST_SPLITS = 16


def bind_latent(request: AttentionRequest) -> Bound:
    """Raises:
    BackendUnavailableError: the installed build lacks what the request needs.
    """
    return with_positive_scale(request, lambda positive: Bound(_Latent(positive)))


class _Latent:
    """A `contract.MLAForward`."""

    def __init__(self, request: AttentionRequest) -> None:
        self._request = request
        self._causal = request.causal != "none"
        scale = request.softmax_scale
        needs = dict.fromkeys((*_LISTS, "sm_scale"), "polyattn")
        splits = dict.fromkeys(("num_kv_splits", "num_kv_splits_indptr"), "polyattn")
        decode = {**needs, **splits} | ({"return_lse": "the LSE"} if request.lse else {})
        kernel = load(AITER, "aiter.mla:mla_decode_fwd", decode)
        lse = {"return_lse": True} if request.lse else {}
        self._decode = functools.partial(kernel, sm_scale=scale, **lse)
        self._prefill = None
        if self._causal and not request.lse and request.heads in PREFILL_HEADS:
            self._prefill = functools.partial(load(AITER, "aiter.mla:mla_prefill_fwd", needs), sm_scale=scale)

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        tables: PagedTables,
        attn_mask: None = None,
        out: Tensor | None = None,
    ) -> Any:
        request = self._request
        if not (query.shape[0] and tables.max_seqlen_k):
            return empty_result(request, query, out)
        page_table, seq_lens, cu_seqlens_q, max_seqlen_q, _ = tables[:5]
        one_each = max_seqlen_q == 1 and query.shape[0] == seq_lens.shape[0]
        tokens = None if one_each else Tokens.of(query, tables)
        real = seq_lens > 0 if tokens is None else tokens.real if self._causal else (seq_lens > 0)[tokens.sequence]
        if tokens is not None and self._prefill is None:
            # Each query as a sequence of its own, as long as what it sees.
            keys = tokens.position.int() + 1 if self._causal else seq_lens[tokens.sequence]
            seq_lens, page_table = keys.where(real, 0), page_table[tokens.sequence]
            cu_seqlens_q = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
        (rows,), lists = token_lists((cache,), tables.changed(page_table=page_table, seq_lens=seq_lens))
        room = query.new_empty(*query.shape[:2], request.dims[1])
        given: dict[str, Any] = {
            "q": query.contiguous(),
            "kv_buffer": rows.unsqueeze(2),
            "o": room,
            "qo_indptr": cu_seqlens_q,
            "kv_indptr": lists.indptr,
            "kv_indices": lists.indices,
            "kv_last_page_lens": torch.ones_like(seq_lens),
        }
        lse = None
        if tokens is not None and self._prefill is not None:
            self._prefill(**given, max_seqlen_q=max_seqlen_q)
        else:
            lse = self._decode(**given, max_seqlen_q=1, **_splits(query, seq_lens.shape[0]))[1]
        room = room.masked_fill_(~real[:, None, None], 0.0)
        return finish_output(request, room, lse if request.lse else None, None, out)


def _splits(query: Tensor, count: int) -> dict[str, Any]:
    """Into how many parts the keys of each sequence are split: enough to use the chip, at least two. Told both ways, it
    makes no tensor that would outlive a recording."""
    units = torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 1
    splits = min(max(units // count, 2), _MOST_SPLITS)
    indptr = torch.arange(0, (count + 1) * splits, splits, dtype=torch.int32, device=query.device)
    return {"num_kv_splits": splits, "num_kv_splits_indptr": indptr}
