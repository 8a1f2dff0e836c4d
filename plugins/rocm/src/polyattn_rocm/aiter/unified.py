"""Family `paged` by AITER's `unified_attention`, a Triton kernel: one call for prefill and decode, FP8 caches with one
scale, sinks; no LSE.

From its source (aiter/ops/triton/attention/unified_attention.py): it is always causal from the lower right corner and
has no right window bound; pages are a power of two; with max_seqlen_q = 1 row i of the queries is sequence i's; the
result for a sequence without keys is undefined where keys are split.

A tile of as many keys as a page is loaded unmasked and weighted with 0, so free slots of a page must hold numbers.
Tiles are of 64 keys at most: larger pages are read where they are. Smaller ones are copied without their free slots,
unless the option `free_slots` promises that these are finite.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import align16, append_new_kv, empty_result, load, with_positive_scale, without_free_slots
from polyattn.contract import AttentionRequest, Bound, PagedTables
from polyattn.semantics.paged_kv import Tokens

from ..records.common import AITER, LARGEST_TILE

__all__ = ["NEW", "OLD", "bind_unified"]

NEW = "aiter.ops.triton.attention.unified_attention:unified_attention"
OLD = "aiter.ops.triton.unified_attention:unified_attention"
"""Where 0.1.7 has it. Its tiles at decode are whole pages, however large."""

_GIVEN = (
    "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal", "window_size",
    "block_table", "softcap", "q_descale", "k_descale", "v_descale", "sinks",
)  # fmt: skip


def bind_unified(request: AttentionRequest, target: str) -> Bound:
    """Raises:
    BackendUnavailableError: the installed build lacks the kernel, or a keyword of it.
    """
    return with_positive_scale(request, lambda positive: Bound(_Unified(positive, target)))


class _Unified:
    """A `contract.PagedForward`."""

    def __init__(self, request: AttentionRequest, target: str) -> None:
        self._request = request
        self._kernel = functools.partial(
            load(AITER, target, dict.fromkeys(_GIVEN, "polyattn")),
            softmax_scale=request.softmax_scale,
            causal=True,
            window_size=(request.window[0], 0),
            softcap=request.softcap,
            q_descale=None,
        )
        self._fp8 = request.kv_storage == "fp8_e4m3"
        masked = target == NEW and request.page_size > LARGEST_TILE
        self._in_place = masked or dict(request.options).get("free_slots", "any") == "finite"

    def __call__(
        self,
        query: Tensor,
        *caches: Tensor,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        request = self._request
        if not (query.shape[0] and tables.max_seqlen_k):
            return empty_result(request, query, out)
        scales = (k_scale, v_scale)
        if key is not None and value is not None:
            new = [rows if s is None else rows.float() / s for rows, s in zip((key, value), scales, strict=True)]
            caches, tables = append_new_kv(request, query, caches, tables, *new)
        if not self._in_place:
            caches, tables = without_free_slots(request, caches, tables)
        page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = tables[:5]
        one_each = max_seqlen_q == 1 and query.shape[0] == seq_lens.shape[0]
        query = align16(query)
        room = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
        descales = [self._descale(scale, query) for scale in scales]
        self._kernel(
            q=query,
            k=caches[0],
            v=caches[1],
            out=room,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q if one_each else max(max_seqlen_q, 2),
            seqused_k=seq_lens,
            max_seqlen_k=max_seqlen_k,
            block_table=page_table.contiguous(),
            k_descale=descales[0],
            v_descale=descales[1],
            sinks=sinks,
        )
        real = seq_lens > 0 if one_each else Tokens.of(query, tables).real
        return room.masked_fill_(~real[:, None, None], 0.0)

    def _descale(self, scale: Tensor | None, query: Tensor) -> Tensor | None:
        if not self._fp8:
            return None
        return query.new_ones(1, dtype=torch.float32) if scale is None else scale.float().reshape(1)
