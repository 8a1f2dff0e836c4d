"""Checks of a dense call."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidInputError
from .common import check_alibi, check_heads_and_dtypes, check_mask, check_out, check_segments, check_sinks
from .tensors import check_tensor


def check_dense(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    sinks: Any,
    out: Any,
    layout: str,
    *,
    alibi: Any = None,
    q_segments: Any = None,
    k_segments: Any = None,
) -> None:
    """Check the tensors of a dense call."""
    bshd = layout == "BSHD"
    shape = "[B, S, H, D]" if bshd else "[B, H, S, D]"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor, 4, shape)
    s, h = (1, 2) if bshd else (2, 1)
    check_heads_and_dtypes(query, key, value, query.shape[h], key.shape[h], value.shape[h], layout=layout)
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise InvalidInputError(
            f"batch sizes differ: query {query.shape[0]}, key {key.shape[0]}, value {value.shape[0]}; expand them"
        )
    if key.shape[s] != value.shape[s]:
        raise InvalidInputError(f"key has {key.shape[s]} positions, value {value.shape[s]}; they must be equal")
    if attn_mask is not None:
        check_mask(attn_mask, query, query.shape[0], query.shape[h], query.shape[s], key.shape[s], "S_q, S_k")
    if sinks is not None:
        check_sinks(sinks, query, query.shape[h])
    if alibi is not None:
        check_alibi(alibi, query, query.shape[h])
    if q_segments is not None:
        check_segments((q_segments, k_segments), query, query.shape[0], query.shape[s], key.shape[s])
    if out is not None:
        check_out(out, query, (*query.shape[:3], value.shape[-1]), (query, key, value), (attn_mask, sinks))
