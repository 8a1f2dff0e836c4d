"""Checks of a call over a paged cache: caches, tables, new keys and options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contract import PagedTables, scalars
from ...errors import InvalidInputError
from .common import check_heads_and_dtypes, check_mask, check_out, check_sinks
from .statics import check_longest
from .tensors import FLOATS, check_index, check_tensor, contents_readable, has_shapes_only
from .varlen import check_cu_seqlens


def check_paged(query: Any, key_cache: Any, value_cache: Any, tables: PagedTables, kv_layout: str) -> None:
    """Check a paged call, contents included where they are readable."""
    if not isinstance(kv_layout, str) or kv_layout not in ("NHD", "HND"):
        raise InvalidInputError(f"kv_layout={scalars.shown(kv_layout)} must be NHD or HND")
    check_tensor("query", query, 3, "[T, H_q, D]")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_tensor(
            name, cache, 4, "[pages, page_size, H_kv, D]" if kv_layout == "NHD" else "[pages, H_kv, page_size, D]"
        )
    h, p = (2, 1) if kv_layout == "NHD" else (1, 2)
    heads = (query.shape[1], key_cache.shape[h], value_cache.shape[h])
    # Two numbers of FP4 share a byte.
    check_heads_and_dtypes(
        query, key_cache, value_cache, *heads, kv_dtypes=True, packed=2 if key_cache.dtype == torch.uint8 else 1
    )
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise InvalidInputError(
            f"key_cache is {tuple(key_cache.shape)}, value_cache {tuple(value_cache.shape)}; pages must agree"
        )
    check_page_table(query, tables, key_cache.shape[0], key_cache.shape[p])


def check_new_keys(query: Tensor, key: Any, value: Any, heads: int, v_head_dim: int) -> None:
    """Check the keys and values of the query tokens, [T_q, H_kv, D | D_v]."""
    if (key is None) != (value is None):
        raise InvalidInputError("key and value go together: pass both, or none")
    for name, new, width in (("key", key, query.shape[2]), ("value", value, v_head_dim)):
        if new is None:
            continue
        shape = (query.shape[0], heads, width)
        check_tensor(name, new, 3, "[T_q, H_kv, D]")
        if tuple(new.shape) != shape or new.dtype not in FLOATS or new.device != query.device:
            raise InvalidInputError(
                f"{name} is {tuple(new.shape)} {new.dtype} on {new.device}; {shape} (T_q, H_kv, D) of a float dtype on "
                f"{query.device} is needed"
            )


def check_serving_options(
    query: Tensor,
    sequences: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Any,
    sinks: Any,
    out: Any,
    v_head_dim: int,
    inputs: tuple[Tensor, ...],
) -> None:
    """Check what a paged or latent call may bring besides its tables."""
    check_mask(attn_mask, query, sequences, query.shape[1], max_seqlen_q, max_seqlen_k, "max_q, max_k")
    check_sinks(sinks, query, query.shape[1])
    check_out(out, query, (*query.shape[:2], v_head_dim), inputs, ())


def check_page_table(query: Tensor, tables: PagedTables, pages: int, page_size: int, grouped: bool = False) -> None:
    """Check the tables of a paged or latent call against a cache of `pages` pages.

    `grouped`: they are those of a `KVPart`, whose queries are not the last tokens of its rows.
    """
    page_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k = tables[:5]
    check_index("page_table", page_table, 2, "[N, max_pages]")
    check_index("seq_lens", seq_lens, 1, "[N]")
    check_index("cu_seqlens_q", cu_seqlens_q, 1, "[N+1]")
    for name, table in (("page_table", page_table), ("seq_lens", seq_lens), ("cu_seqlens_q", cu_seqlens_q)):
        if table.device != query.device:
            raise InvalidInputError(f"{name} is on {table.device}, query on {query.device}; move it")
    check_longest(max_seqlen_q, max_seqlen_k)
    if page_size < 1:
        raise InvalidInputError("the pages of the cache hold 0 tokens; a page holds 1 or more")
    count = page_table.shape[0]
    if seq_lens.shape[0] != count or cu_seqlens_q.shape[0] != count + 1:
        raise InvalidInputError(
            f"page_table has {count} rows, seq_lens {seq_lens.shape[0]} entries, cu_seqlens_q {cu_seqlens_q.shape[0]}; "
            f"N, N and N + 1 are needed"
        )
    if has_shapes_only(page_table):
        raise InvalidInputError(
            "page_table is a meta or fake tensor, and calls over a cache read what is in it: pass tensors with contents"
        )
    if not contents_readable(seq_lens):
        return
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, query.shape[0], max_seqlen_q, "max_seqlen_q")
    starts = cu_seqlens_q.tolist()
    rows = page_table.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        new = starts[i + 1] - starts[i]
        needed = -(-length // page_size)
        if length < 0 or (0 < length < new and not grouped):  # 0 marks a padding row, whatever its queries
            raise InvalidInputError(
                f"seq_lens[{i}]={length} is less than its {new} queries; it counts all keys, new ones included"
            )
        if length > max_seqlen_k:
            raise InvalidInputError(f"max_seqlen_k={max_seqlen_k} is less than seq_lens[{i}]={length}")
        if needed > page_table.shape[1]:
            raise InvalidInputError(
                f"seq_lens[{i}]={length} needs {needed} pages of {page_size}, page_table has {page_table.shape[1]}"
            )
        for column in range(needed):
            if not 0 <= rows[i][column] < pages:
                raise InvalidInputError(
                    f"page_table[{i}, {column}]={rows[i][column]} is not a page of the cache, 0 to {pages - 1}"
                )
