"""Latent attention to listed tokens: the rows of each query are gathered, whatever pages they lie in."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..contract import AttentionRequest, Bound, PagedTables
from ..semantics.kv_quant import mla_unpack

__all__ = ["ListedLatent"]

_ROOM = 2**26
"""Numbers that are gathered at once."""


class ListedLatent:
    """Binds latent requests with `token_topk`. Nothing is read on the host, so that steps may be recorded."""

    def bind(self, request: AttentionRequest) -> Bound:
        return Bound(functools.partial(_forward, request))


def _forward(
    request: AttentionRequest,
    query: Tensor,
    cache: Tensor,
    *,
    tables: PagedTables,
    token_indices: Tensor,
    attn_mask: None = None,
    out: Tensor | None = None,
) -> Any:
    page_table, _, starts = tables[:3]
    if not page_table.numel():  # nobody has keys
        page_table = page_table.new_zeros(max(len(page_table), 1), 1)
    tokens, heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    found = query.new_empty(tokens, heads, request.dims[1], dtype=wide)
    lse = query.new_empty(tokens, heads, dtype=wide)
    counting = torch.arange(tokens, device=query.device)
    row = torch.searchsorted(starts[1:].long(), counting, right=True).clamp(max=max(len(page_table) - 1, 0))
    step = max(_ROOM // (request.token_topk * request.head_dim), 1)
    for start in range(0, tokens, step):
        some = slice(start, start + step)
        listed = token_indices[some].long()
        place = listed.clamp(min=0)
        page = page_table[row[some, None], place // request.page_size].long()
        rows = cache[page, place % request.page_size]
        keys = mla_unpack(rows).to(wide)
        none = (listed < 0)[:, None]
        # Free slots may hold anything.
        keys = keys.masked_fill(none.transpose(1, 2), 0.0)
        logits = query[some].to(wide) @ keys.transpose(1, 2) * request.softmax_scale
        logits.masked_fill_(none, -torch.inf)
        lse[some] = torch.logsumexp(logits, -1)
        weights = torch.exp(logits - lse[some, :, None].clamp(min=torch.finfo(wide).min))
        found[some] = weights @ keys[..., : request.dims[1]]
    result = found.to(query.dtype) if out is None else out.copy_(found)
    return (result, lse) if request.lse else result
