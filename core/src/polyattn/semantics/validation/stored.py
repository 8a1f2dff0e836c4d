"""Checks of how a cache stores its numbers, and of the places that a call writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contract import PagedTables
from ...contract.overlap import shares_memory
from ...errors import InvalidInputError
from ..kv_quant import FP4_BLOCK
from .tensors import check_plain, contents_readable


def check_storage(query: Tensor, key_cache: Tensor, value_cache: Tensor, k_scale: Any, v_scale: Any, heads: int) -> str:
    """Check how two caches store their numbers; returns the granularity of the scales as `AttentionRequest.kv_scales`
    has it."""
    if key_cache.dtype != value_cache.dtype:
        raise InvalidInputError(f"key_cache is {key_cache.dtype}, value_cache {value_cache.dtype}; one dtype is needed")
    if (k_scale is None) != (v_scale is None):
        raise InvalidInputError("k_scale and v_scale go together: pass both, or none")
    tokens, fp4 = tuple(key_cache.shape[:3]), key_cache.dtype == torch.uint8
    for name, scale, cache in (("k_scale", k_scale, key_cache), ("v_scale", v_scale, value_cache)):
        if isinstance(scale, Tensor):
            check_plain(name, scale)
        if fp4:
            _fp4_scale(name, scale, query, cache)
            continue
        if scale is None:
            continue
        allowed = f"one number, [{heads}] (H_kv) or {list(tokens)} (one per token and head)"
        if not isinstance(scale, Tensor) or not scale.is_floating_point() or scale.device != query.device:
            shown = f"{scale.dtype} on {scale.device}" if isinstance(scale, Tensor) else f"a {type(scale).__name__}"
            raise InvalidInputError(f"{name} is {shown}; a float tensor on {query.device} is needed: {allowed}")
        if scale.numel() != 1 and tuple(scale.shape) not in ((heads,), tokens):
            raise InvalidInputError(f"{name} has shape {tuple(scale.shape)}; allowed: {allowed}")
    if k_scale is None:
        return ""
    found = {_granularity(scale) for scale in (k_scale, v_scale)}
    if len(found) > 1:
        raise InvalidInputError(
            f"k_scale has shape {tuple(k_scale.shape)}, v_scale {tuple(v_scale.shape)}; one granularity is needed: one "
            f"number each, or [{heads}] (H_kv), or {list(tokens)}"
        )
    return found.pop()


def _granularity(scale: Tensor) -> str:
    return "block16" if scale.ndim == 4 else "tensor" if scale.numel() == 1 else "head" if scale.ndim == 1 else "token"


def _fp4_scale(name: str, scale: Any, query: Tensor, cache: Tensor) -> None:
    width = 2 * cache.shape[-1]
    if width % FP4_BLOCK:
        raise InvalidInputError(
            f"a cache of uint8 holds FP4, two numbers a byte and one scale for each {FP4_BLOCK}: head dim {width} is "
            f"no multiple of {FP4_BLOCK}; pad it, or keep the cache in FP8"
        )
    shape = (*cache.shape[:3], width // FP4_BLOCK)
    fits = isinstance(scale, Tensor) and tuple(scale.shape) == shape and scale.device == query.device
    if not fits or scale.dtype not in (torch.float8_e4m3fn, torch.float32):
        is_tensor = isinstance(scale, Tensor)
        shown = f"{tuple(scale.shape)} {scale.dtype} on {scale.device}" if is_tensor else f"a {type(scale).__name__}"
        raise InvalidInputError(
            f"{name} is {shown}; a cache of uint8 holds FP4, whose scales are {shape} of float8_e4m3fn or float32 on "
            f"{query.device}, one for each {FP4_BLOCK} numbers of a row"
        )


def check_saving(key_cache: Tensor, value_cache: Tensor, tables: PagedTables, page_size: int) -> None:
    """Check that every new key and value of a paged call has a place of its own; the rest is checked already."""
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if 0 in cache.stride() and any(n > 1 and not cache.stride(axis) for axis, n in enumerate(cache.shape)):
            raise InvalidInputError(
                f"{name} has strides {cache.stride()}, so that several places of it are one, and save_kv_cache=True "
                f"writes into it; pass a cache with memory of its own for each: {name}.contiguous()"
            )
    if shares_memory(key_cache, value_cache):
        raise InvalidInputError(
            "key_cache and value_cache share memory, and save_kv_cache=True writes keys and values into it; pass two "
            "caches, or two halves of one"
        )
    if not contents_readable(tables.seq_lens):
        return
    starts, pages = tables.cu_seqlens_q.tolist(), tables.page_table.tolist()
    taken: dict[int, list[tuple[int, int, int]]] = {}
    for i, length in enumerate(tables.seq_lens.tolist()):
        first = length - (starts[i + 1] - starts[i])
        if length <= 0:  # a row of padding
            continue
        for column in range(first // page_size, -(-length // page_size)):
            low, high = max(first - column * page_size, 0), min(length - column * page_size, page_size)
            others = taken.setdefault(pages[i][column], [])
            for begin, end, other in others:
                if low < end and begin < high:
                    raise InvalidInputError(
                        f"rows {other} and {i} both write slot {max(low, begin)} of page {pages[i][column]}, and "
                        f"save_kv_cache=True would keep one of the two; give each row a page of its own for its new "
                        f"tokens"
                    )
            others.append((low, high, i))
