"""Checks of what paged and latent calls have beyond tables (`validate`): stored numbers, draft trees, further keys.

Every check raises InvalidInputError naming what, which value, what is allowed and the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract import KVPart, PagedTables, scalars
from ..errors import InvalidInputError
from .kv_quant import FP4_BLOCK, MLA_BYTES, MLA_WIDTHS
from .validation import FLOATS, check_dense_axis, check_page_table, check_plain, contents_readable, shares_memory

__all__ = ["check_kv_parts", "check_mla", "check_saving", "check_storage", "check_tree"]


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


def check_tree(attn_mask: Any, tables: PagedTables, chunked_prefix: bool, kv_parts: Sequence[KVPart]) -> None:
    """Check what `tree=True` promises of a mask [N|1, H_q|1, max_seqlen_q, max_seqlen_k] that is checked already."""
    if attn_mask is None or attn_mask.dtype != torch.bool:
        shown = "None" if attn_mask is None else attn_mask.dtype
        raise InvalidInputError(
            f"tree=True goes with a bool attn_mask, not with {shown}; make it with "
            f"polyattn.semantics.reference.verify_mask"
        )
    for name, given, instead in (
        ("chunked_prefix=True", chunked_prefix, "drafts are few and attend their prefix in one piece: leave it out"),
        ("kv_parts", bool(kv_parts), "pass attn_mask over the call's own keys and leave tree out"),
    ):
        if given:
            raise InvalidInputError(f"tree=True and {name} exclude each other: {instead}")
    if not contents_readable(attn_mask):
        return
    drafts, seq_lens = tables.cu_seqlens_q.diff(), tables.seq_lens
    rows = torch.arange(attn_mask.shape[2], device=attn_mask.device) < drafts[:, None]
    columns = torch.arange(attn_mask.shape[3], device=attn_mask.device) < (seq_lens - drafts)[:, None]
    hidden = ~attn_mask & rows[:, None, :, None] & columns[:, None, None, :]
    if bool(hidden.any()):
        n, _, row, column = hidden.nonzero()[0].tolist()
        raise InvalidInputError(
            f"tree=True says that every draft sees all keys before the drafts, but attn_mask hides key {column} from "
            f"row {row} of sequence {n}, which has {int(seq_lens[n] - drafts[n])} of them; leave tree out for such a "
            f"mask"
        )


def check_kv_parts(
    query: Tensor, parts: Sequence[Any], window: tuple[int, int], pools: Mapping[str, Tensor], page: int, scales: Any
) -> None:
    """Check the parts of a paged or latent call.

    Args:
        window: the call's. pools: its caches by argument name, `page` being the axis of a page's tokens.
        scales: its k_scale; one for each token belongs to the call's own pool.
    """
    if not isinstance(parts, (tuple, list)) or not all(isinstance(part, KVPart) for part in parts):
        kinds = ", ".join(type(p).__name__ for p in parts) if isinstance(parts, (tuple, list)) else type(parts).__name__
        raise InvalidInputError(f"kv_parts is {kinds}; a list of polyattn.KVPart is needed")
    if parts and (window[0] >= 0 or window[1] > 0):
        raise InvalidInputError(
            f"window={window} and kv_parts exclude each other: a window counts positions, which parts do not have. "
            f"Give one page table with all keys"
        )
    for i, part in enumerate(parts):
        given = _own_pool(f"kv_parts[{i}]", part, pools)
        if given and isinstance(scales, Tensor) and scales.ndim > 1 and scales.numel() > 1:
            raise InvalidInputError(
                f"kv_parts[{i}] has a pool of its own, and k_scale {list(scales.shape)} belongs to the tokens of the "
                f"call's; keep the part in the call's pool, or scale by tensor or head"
            )
        pool = next(iter((given or pools).values()))
        try:
            check_page_table(query, part.tables, pool.shape[0], pool.shape[page], grouped=True)
        except InvalidInputError as exc:
            raise InvalidInputError(f"kv_parts[{i}]: {exc}") from exc


def _own_pool(label: str, part: KVPart, pools: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The pool that a part brings, empty where it is in the call's."""
    all_ = {name: getattr(part, name) for name in ("key_cache", "value_cache", "cache")}
    given = {name: tensor for name, tensor in all_.items() if tensor is not None}
    if given and given.keys() != pools.keys():
        raise InvalidInputError(
            f"{label} has a pool of its own by {' and '.join(given)}; pass all or none of {', '.join(pools)}"
        )
    for name, tensor in given.items():
        like = pools[name]
        if isinstance(tensor, Tensor):
            check_plain(f"{label}.{name}", tensor)
        fits = isinstance(tensor, Tensor) and tensor.shape[1:] == like.shape[1:]
        if not fits or tensor.dtype != like.dtype or tensor.device != like.device:
            shown = f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInputError(
                f"{label}.{name} is {shown}; one like the call's is needed: [pages, "
                f"{', '.join(map(str, like.shape[1:]))}] {like.dtype} on {like.device}"
            )
        if tensor.shape[-1] != 1 and tensor.stride(-1) != 1:
            raise InvalidInputError(f"{label}.{name}'s last axis is not dense; pass it .contiguous()")
    return given


def check_mla(query: Any, cache: Any, v_head_dim: Any) -> None:
    """Check the tensors of a latent call."""
    for name, tensor, shape in (
        ("query", query, "[T, H_q, D_c + D_r]"),
        ("cache", cache, "[pages, page_size, D_c + D_r]"),
    ):
        if isinstance(tensor, Tensor):
            check_plain(name, tensor)
        if not isinstance(tensor, Tensor) or tensor.ndim != 3:
            shown = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInputError(f"{name} is {shown}; a tensor {shape} is needed")
    if not scalars.whole(v_head_dim):
        raise InvalidInputError(
            f"v_head_dim={scalars.shown(v_head_dim)} is a {type(v_head_dim).__name__}; give a whole number, the "
            f"leading part of a row that is the value"
        )
    if query.device != cache.device:
        raise InvalidInputError(f"query is on {query.device}, cache on {cache.device}; move them to one device")
    for name, tensor in (("query", query), ("cache", cache)):
        check_dense_axis(name, tensor)
    fp8 = cache.dtype == torch.uint8 and cache.shape[2] == MLA_BYTES and query.dtype in FLOATS
    if query.dtype != cache.dtype and not fp8:
        raise InvalidInputError(
            f"query is {query.dtype}, cache {cache.dtype}; one dtype is needed (FP8 rows are uint8 [pages, page_size, "
            f"{MLA_BYTES}], as polyattn.semantics.reference.mla_unpack_fp8 reads them)"
        )
    if fp8 and (query.shape[2], v_head_dim) != MLA_WIDTHS:
        raise InvalidInputError(
            f"query rows have {query.shape[2]} numbers and v_head_dim is {v_head_dim}; FP8 rows hold {MLA_WIDTHS[0]}, "
            f"the first {MLA_WIDTHS[1]} of them the value"
        )
    if not fp8 and (query.shape[2] != cache.shape[2] or not 0 < v_head_dim <= query.shape[2]):
        raise InvalidInputError(
            f"query rows have {query.shape[2]} numbers, cache rows {cache.shape[2]}, v_head_dim is {v_head_dim}; rows "
            f"must be equal and v_head_dim the leading part of them"
        )
