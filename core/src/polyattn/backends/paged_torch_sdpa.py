"""The serving side of `torch_sdpa`: one SDPA call over gathered, padded keys, with a mask that says all.

Lengths stay on the device and sizes come from the host's bounds, so a call can be recorded into a device graph. Its
price is memory: every sequence is padded to `max_seqlen_k`.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ..adapters import Padded, empty_result
from ..contract import AttentionRequest, Bound, PagedTables
from .gathered_sdpa import GatheredSDPA

__all__ = ["bind"]


def bind(request: AttentionRequest) -> Bound:
    """The function of a paged or latent request."""
    return Bound(functools.partial(_forward, request, GatheredSDPA(request)))


def _forward(
    request: AttentionRequest,
    attend: GatheredSDPA,
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
    keys, values = padded.gather(caches, (key, value), query.dtype)
    result, lse = attend(padded.queries(query), keys, values, padded.mask(attn_mask))
    return padded.finish_output(result, lse, sinks, out)
