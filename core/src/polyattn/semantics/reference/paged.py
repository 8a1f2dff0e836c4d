"""Attention over a paged cache (S9): which rows of the pages are the keys of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from ...contract import Causal
from ..kv_quant import stored
from .dense import compute_dtype_of
from .varlen import each_sequence, spans_of


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    kv_layout: str = "NHD",
    key: Tensor | None = None,
    value: Tensor | None = None,
    save_kv_cache: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: Causal = "bottom_right",
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a paged cache; the queries are the last tokens of their sequences (S9).

    New keys and values, where given, are the rows of the query tokens and are attended whatever `save_kv_cache` says;
    the flag only decides whether this call also writes them. Either way they are rounded as the cache would round
    them, so both flags give the same output.

    Args:
        query: [T_q, H_q, D].
        key_cache: [pages, page_size, H_kv, D] for kv_layout NHD, [pages, H_kv, page_size, D] for HND.
        value_cache: the same with D_v.
        page_table: int32 [N, max_pages], the pages of each sequence in order; entries past its length are not read.
        seq_lens: int32 [N], keys of each sequence, those of the query tokens included; 0 = a padding row.
        cu_seqlens_q: int32 [N+1].
        key, value: [T_q, H_kv, D] and [T_q, H_kv, D_v], or None when the cache already holds them.
        save_kv_cache: write `key` and `value` into the caches, in place.
        k_scale, v_scale: stored value * scale = real value; one number, [H_kv], or one per token and head in the
            layout of the cache without its last axis. None = 1.
        attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k].
        causal: bottom_right unless said otherwise, since the queries are the end of their sequence.
        The rest: as `attention`.

    Returns:
        out [T_q, H_q, D_v], or (out, lse [T_q, H_q]).

    Raises:
        UnsupportedRequestError: `max_bytes` cannot be kept.
    """
    if kv_layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
        k_scale, v_scale = (s.transpose(1, 2) if s is not None and s.dim() == 3 else s for s in (k_scale, v_scale))
    dtype = compute_dtype or compute_dtype_of(query)
    spans, lengths = spans_of(cu_seqlens_q), seq_lens.tolist()
    slots = [_slots(page_table[n], length, key_cache.shape[1]) for n, length in enumerate(lengths)]

    new_keys = _rounded(key, key_cache, k_scale, spans, slots)
    new_values = _rounded(value, value_cache, v_scale, spans, slots)
    if save_kv_cache:
        _write(key_cache, slots, new_keys)
        _write(value_cache, slots, new_values)

    return each_sequence(
        query,
        spans,
        lengths,
        lambda n: (
            _read(key_cache, slots[n], k_scale, dtype, new_keys[n]),
            _read(value_cache, slots[n], v_scale, dtype, new_values[n]),
        ),
        value_cache.shape[-1],
        trained=(query, key_cache, value_cache, key, value, sinks, attn_mask, alibi),
        attn_mask=attn_mask,
        return_lse=return_lse,
        compute_dtype=compute_dtype,
        max_bytes=max_bytes,
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        scale=scale,
        dropout_p=dropout_p,
    )


_Slots = tuple[Tensor, Tensor]
"""(page, place in the page) of each token of one sequence, int64 [S_k] both."""


def _slots(pages: Tensor, length: int, page_size: int) -> _Slots:
    token = torch.arange(length, device=pages.device)
    return pages[token // page_size].long(), token % page_size


def _tail(slots: _Slots, count: int) -> _Slots:
    start = slots[0].shape[0] - count
    return slots[0][start:], slots[1][start:]


def _scales(scale: Tensor | None, slots: _Slots) -> Tensor | float:
    """The scale of each row, broadcastable to [S_k, H_kv, D]."""
    if scale is None:
        return 1.0
    if scale.dim() == 3:
        return scale[slots].unsqueeze(-1)
    return scale.reshape(-1, 1)


def _rounded(
    new: Tensor | None, cache: Tensor, scale: Tensor | None, spans: list[slice], slots: list[_Slots]
) -> list[Tensor]:
    """New rows of each sequence as the cache stores them; none where there are none, or for a padding sequence."""
    found = []
    for span, where in zip(spans, slots, strict=True):
        fresh = cache[:0, 0] if new is None else new[span] if where[0].shape[0] else new[:0]
        factor = None if new is None or scale is None else torch.as_tensor(_scales(scale, _tail(where, len(fresh))))
        found.append(fresh.to(cache.dtype) if new is None else stored(fresh, factor, cache.dtype))
    return found


def _write(cache: Tensor, slots: list[_Slots], rows: list[Tensor]) -> None:
    with torch.no_grad():
        for where, new in zip(slots, rows, strict=True):
            cache[_tail(where, new.shape[0])] = new.detach()


def _read(cache: Tensor, slots: _Slots, scale: Tensor | None, dtype: torch.dtype, new: Tensor) -> Tensor:
    """Rows [S_k, H_kv, D] of one sequence in real units, the last of them being `new`."""
    old = cache[slots].to(dtype)
    rows = torch.cat([old[: old.shape[0] - new.shape[0]], new.to(dtype)])
    factor = _scales(scale, slots)
    return rows * (factor.to(dtype) if isinstance(factor, Tensor) else factor)
