"""The serving side of `torch_native`: each sequence's keys are gathered and attended by an SDPA call of their own.

Lengths are read on the host: nothing is padded, and nothing but one sequence is ever gathered at once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..adapters.gather_kv import deliver, sides, store
from ..contract import AttentionRequest, Bound
from ..semantics.masks import combined
from ..semantics.paged_kv import Slots, Tokens
from ..semantics.reference import visible
from .gathered_sdpa import GatheredSDPA

__all__ = ["PagedTorchNative"]


class PagedTorchNative:
    """Binds paged and latent requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        return Bound(functools.partial(_forward, request, GatheredSDPA(request)))


def _forward(
    request: AttentionRequest,
    attend: GatheredSDPA,
    query: Tensor,
    *caches: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: None = None,
    v_scale: None = None,
    out: Tensor | None = None,
) -> Any:
    if request.save_kv_cache and key is not None:
        tokens = Tokens.of(query, seq_lens, cu_seqlens_q)
        store(request, caches, tokens.slots(page_table, request.page_size), (key, value))
        key = value = None
    # One copy to the host, not one for each sequence.
    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    outs = [query.new_zeros(0, query.shape[1], request.dims[1])]
    lses: list[Tensor] = [query.new_zeros(0, query.shape[1], dtype=torch.float32)]
    for n, s_k in enumerate(lengths):
        span = slice(starts[n], starts[n + 1])
        queries = query[span]
        if not len(queries):
            continue
        if not s_k:
            outs.append(queries.new_zeros(*queries.shape[:2], request.dims[1]))
            lses.append(queries.new_full(queries.shape[:2], -torch.inf, dtype=torch.float32))
            continue
        new = (None, None) if key is None or value is None else (key[span], value[span])
        mask = None if attn_mask is None else attn_mask[n if attn_mask.shape[0] > 1 else 0][None]
        result, lse = _sequence(request, attend, queries, caches, page_table[n], s_k, new, mask)
        outs.append(result[0].transpose(0, 1))
        if lse is not None:
            lses.append(lse[0].transpose(0, 1))
    wanted = request.lse or sinks is not None
    return deliver(request, torch.cat(outs), torch.cat(lses) if wanted else None, sinks, out)


def _sequence(
    request: AttentionRequest,
    attend: GatheredSDPA,
    query: Tensor,
    caches: tuple[Tensor, ...],
    pages: Tensor,
    s_k: int,
    new: tuple[Tensor | None, Tensor | None],
    attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one sequence: query [S_q, H_q, D], its pages [max_pages], mask [1, 1|H_q, ...]."""
    s_q, left = query.shape[0], request.window[0]
    # Keys before the window of the first query are seen by nobody.
    first = max(s_k - s_q - left, 0) if left >= 0 and not request.chunk else 0
    token = torch.arange(first, s_k, device=query.device)
    size = request.page_size
    slots = Slots(pages[token // size].long(), token % size, token >= 0)
    found = sides(request, caches, slots, query.dtype)
    if new[0] is not None:
        found = [
            torch.cat([rows[: len(rows) - s_q], fresh.to(rows.dtype)])
            for rows, fresh in zip(found, new, strict=True)
            if fresh is not None
        ]
    q, k, v = (rows.transpose(0, 1)[None] for rows in (query, *found))

    mask = None if attn_mask is None else attn_mask[:, :, :s_q, first:s_k]
    plain = request.window == (-1, -1) and not request.chunk
    if plain and request.causal != "none" and s_q == s_k and mask is None:
        return attend(q, k, v, None, causal=s_q > 1)
    # A query at the end sees all that its window left.
    if s_q > 1 or request.chunk:
        offset = s_k - s_q - first
        options: dict[str, Any] = {"window": request.window, "chunk": request.chunk, "device": query.device}
        seen = visible(s_q, s_k - first, causal=request.causal, q_offset=offset, **options)
        mask = mask if seen is None else combined(mask, seen[None, None])
    return attend(q, k, v, mask)
