"""The serving side of `flex_attention`: the padded batch of gathered keys, under a mask_mod of its lengths.

Lengths stay on the device. Any page size; window, chunk, softcap, sinks, masks and the LSE as in its dense calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..adapters import Padded, align16, empty_result, launch_slices
from ..contract import AttentionRequest, Bound, PagedTables
from .flex_attention import dense, fused, position_rule, run

__all__ = ["PagedFlexAttention"]


class PagedFlexAttention:
    """Binds paged requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        return Bound(functools.partial(_forward, request, fused(request)))


def _forward(
    request: AttentionRequest,
    kernel: Callable[..., Any],
    query: Tensor,
    *caches: Tensor,
    tables: PagedTables,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: None = None,
    v_scale: None = None,
    out: Tensor | None = None,
) -> Any:
    if not (query.shape[0] and tables.max_seqlen_k):
        return empty_result(request, query, out)
    padded = Padded.of(request, query, tables)
    q = padded.queries(query if request.platform == "cpu" else align16(query))
    k, v = padded.gather(caches, (key, value), query.dtype)
    if attn_mask is None:
        parts = launch_slices(q.shape[0], request.heads) if request.platform != "cpu" else [slice(None)]
        found = [
            run(request, kernel, q[some], k[some], v[some], _block_mask(padded, some), None, sinks) for some in parts
        ]
        result = torch.cat([one for one, _ in found]) if len(found) > 1 else found[0][0]
        lses = [one for _, one in found if one is not None]
        lse = torch.cat(lses) if len(lses) > 1 else found[0][1]
    else:
        # The rules by position are in the mask then.
        whole = dense(_masked(request), kernel, q, k, v, attn_mask=padded.mask(attn_mask), sinks=sinks)
        result, lse = whole if isinstance(whole, tuple) else (whole, None)
    # Sinks are in the result already.
    return padded.finish_output(result, lse, None, out)


@functools.lru_cache(maxsize=1024)
def _masked(request: AttentionRequest) -> AttentionRequest:
    return dataclasses.replace(request, family="dense", layout="BHSD", causal="none", window=(-1, -1), chunk=0)


def _block_mask(padded: Padded, some: slice) -> BlockMask:
    """Return what the queries of some sequences see."""
    filled, offset, rule = padded.filled[some], padded.offset[some], position_rule(padded.request)

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j < filled[b]
        return seen if rule is None else seen & rule(i + offset[b], j)

    device: torch.device = filled.device
    return create_block_mask(mod, filled.shape[0], None, padded.rows, padded.columns, device=str(device))
