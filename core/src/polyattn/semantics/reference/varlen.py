"""Attention of a packed batch: sequence by sequence, each by the dense definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...contract import Causal
from .dense import attention, compute_dtype_of
from .memory import keeps_less, rows_within, score_bytes, trains


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: Causal = "none",
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    kept_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence of a packed batch with its own keys.

    Args:
        query: [T_q, H_q, D]; key: [T_k, H_kv, D]; value: [T_k, H_kv, D_v].
        cu_seqlens_q, cu_seqlens_k: int32 [N+1], first 0, last T.
        max_seqlen_q, max_seqlen_k: part of the family's call; the reference reads the lengths themselves.
        attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k], read up to each sequence's lengths.
        The rest: as `attention`.

    Returns:
        out [T_q, H_q, D_v], or (out, lse [T_q, H_q]).

    Raises:
        UnsupportedRequestError: `max_bytes` cannot be kept.
    """
    spans, k_spans = spans_of(cu_seqlens_q), spans_of(cu_seqlens_k)
    return each_sequence(
        query,
        spans,
        [span.stop - span.start for span in k_spans],
        lambda n: (key[k_spans[n]], value[k_spans[n]]),
        value.shape[-1],
        trained=(query, key, value, sinks, attn_mask, alibi),
        attn_mask=attn_mask,
        return_lse=return_lse,
        compute_dtype=compute_dtype,
        max_bytes=max_bytes,
        kept_bytes=kept_bytes,
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        scale=scale,
        dropout_p=dropout_p,
    )


def spans_of(cu_seqlens: Tensor) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(cu_seqlens.tolist())]


def each_sequence(
    query: Tensor,
    spans: list[slice],
    lengths: list[int],
    rows: Callable[[int], tuple[Tensor, Tensor]],
    D_v: int,
    *,
    trained: Sequence[Tensor | None],
    attn_mask: Tensor | None,
    return_lse: bool,
    compute_dtype: torch.dtype | None,
    max_bytes: int | None,
    kept_bytes: int | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of the queries in each span, sequence by sequence, packed again.

    `rows(n)` gives the keys [lengths[n], H_kv, D] and values [lengths[n], H_kv, D_v] of sequence n when its turn comes.
    """
    dtype = compute_dtype or compute_dtype_of(query)
    H_q = query.shape[1]
    if max_bytes is not None and trains(trained):
        # A backward pass keeps the scores of every sequence, so it is their sum that must fit.
        pairs = zip(spans, lengths, strict=True)
        area = sum(score_bytes(1, H_q, s.stop - s.start, m, itemsize=dtype.itemsize) for s, m in pairs)
        if keeps_less(kept_bytes, area, trained):
            kept_bytes = 0
        else:
            rows_within(max_bytes, area, 1, True)

    outs, lses = [query.new_zeros(0, H_q, D_v)], [query.new_zeros(0, H_q, dtype=dtype)]
    for n, (span, length) in enumerate(zip(spans, lengths, strict=True)):
        keys, values = rows(n)
        mask = attn_mask
        if mask is not None:
            mask = mask[n : n + 1] if mask.shape[0] > 1 else mask
            mask = mask[:, :, : span.stop - span.start, :length]
        out, lse = attention(
            query[span][None],
            keys[None],
            values[None],
            attn_mask=mask,
            return_lse=True,
            compute_dtype=compute_dtype,
            max_bytes=max_bytes,
            kept_bytes=kept_bytes,
            **options,
        )
        outs.append(out[0])
        lses.append(lse[0])
    packed = torch.cat(outs)
    return (packed, torch.cat(lses)) if return_lse else packed
