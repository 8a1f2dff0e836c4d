"""Inputs over a cache, as an engine has them: each set is a layer with its own pages, all under one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contract import KVPart
from ...selection.config import KV_CACHE_DTYPES
from ...serving import (
    AttentionLayer,
    DraftTree,
    ForwardBatch,
    ForwardMode,
    KVCacheConfig,
    KVPool,
    PageAllocator,
    RequestTable,
)
from ...serving.step.step import StepBuffers
from .inputs import Inputs, Maker

__all__ = ["cached_inputs", "slots_of"]

_MIXED = 64
"""Tokens that a sequence gets at a time: so its pages lie mixed with those of others, as they do after a while."""
_FILLED = 65536
"""Tokens that are written at once."""
_SCALE = 0.75
"""Of keys and of values, where a cache has static scales."""


def cached_inputs(maker: Maker, count: int) -> Inputs:
    """Inputs of families paged and mla."""
    request, workload, device = maker.request, maker.workload, maker.device
    layers = [_layer(maker, number) for number in range(count)]
    size = request.page_size
    pages = 1 + sum(-(-s_k // size) for _, s_k in workload.lengths) + -(-workload.shared // size)
    pool = _pool(maker, layers, pages)
    allocator = PageAllocator(pages)
    prefix = allocator.allocate(-(-workload.shared // size))
    table, rows = _table(maker, allocator)
    batch = ForwardBatch(
        _mode(maker), rows, [k for _, k in workload.lengths], [q for q, _ in workload.lengths], _tree(maker)
    )
    buffers = StepBuffers(workload.batch, workload.tokens, table.tables[0].shape[1], device=device)
    step = buffers.build(batch, table)[0]
    tensors = [_tensors(maker, pool, layer, step.slots) for layer in layers]
    extra: dict[str, Any] = dict(step.keywords)
    if workload.shared:
        extra["kv_parts"] = (_prefix(maker, prefix),)
    return Inputs(workload, device, tensors, extra, step=step, pool=pool)


def _layer(maker: Maker, number: int) -> AttentionLayer:
    r = maker.request
    return AttentionLayer(
        number, r.heads, r.kv_heads, r.head_dim, r.dims[1],
        scale=r.scale, softcap=0.0 if r.family == "mla" else r.softcap, latent=r.family == "mla",
    )  # fmt: skip


def _pool(maker: Maker, layers: list[AttentionLayer], pages: int) -> KVPool:
    """Pages of the request's kind, all of them full."""
    r = maker.request
    stored = next(word for word, dtype in KV_CACHE_DTYPES.items() if dtype == r.kv_dtype)
    scales = "" if r.kv_scales == "block128" else r.kv_scales
    config = KVCacheConfig(stored, r.page_size, r.kv_layout or "NHD", scales)  # type: ignore[arg-type]
    pool = KVPool(layers, config, pages, dtype=maker.dtype, device=maker.device)
    for layer in layers:
        if r.kv_scales in ("tensor", "head"):
            scale = _SCALE if r.kv_scales == "tensor" else torch.full((r.kv_heads,), _SCALE, device=maker.device)
            pool.set_scales(layer.layer_id, scale, scale)
        for slots in torch.split(torch.arange(pages * r.page_size, device=maker.device), _FILLED):
            pool.write(layer.layer_id, slots, *_new_rows(maker, slots.shape[0]))
    return pool


def _new_rows(maker: Maker, tokens: int) -> tuple[Tensor, ...]:
    r = maker.request
    if r.family == "mla":
        return (maker.normal(tokens, r.head_dim),)
    return maker.normal(tokens, r.kv_heads, r.head_dim), maker.normal(tokens, r.kv_heads, r.dims[1])


def _table(maker: Maker, allocator: PageAllocator) -> tuple[RequestTable, list[int]]:
    workload, size = maker.workload, maker.request.page_size
    table = RequestTable(workload.batch, workload.longest[1], size, [-1], [allocator], device=maker.device)
    rows = [table.add() for _ in workload.lengths]
    left = [s_k for _, s_k in workload.lengths]
    while any(left):
        for n, row in enumerate(rows):
            some = min(max(size, _MIXED), left[n])
            table.extend(row, some)
            left[n] -= some
    table.flush()
    return table, rows


def _mode(maker: Maker) -> ForwardMode:
    if maker.request.tree:
        return ForwardMode.TARGET_VERIFY
    return ForwardMode.DECODE if maker.workload.longest[0] == 1 else ForwardMode.EXTEND


def _tree(maker: Maker) -> DraftTree | None:
    """Each node below one of the four before it: deep and bushy."""
    if not maker.request.tree:
        return None
    nodes = torch.arange(maker.workload.longest[0], device=maker.device)
    shape = (maker.workload.batch, len(nodes))
    back = torch.randint(1, 5, shape, device=maker.device, generator=maker.random)
    return DraftTree.from_parents((nodes - back).clamp(min=0).where(nodes > 0, -1))


def _tensors(maker: Maker, pool: KVPool, layer: AttentionLayer, slots: Tensor) -> dict[str, Tensor]:
    r, cache = maker.request, pool.cache(layer.layer_id)
    names = ("key_cache", "value_cache", "cache", "k_scale", "v_scale")
    found = {name: t for name in names if (t := getattr(cache, name)) is not None}
    made = {"query": maker.normal(maker.workload.tokens, r.heads, r.head_dim), **found, **maker.options()}
    if r.save_kv_cache is not None:
        # They are in the cache already: a kernel that writes them changes nothing, so every call is the same.
        made["key"], made["value"] = _new_rows(maker, slots.shape[0])
        pool.write(layer.layer_id, slots, made["key"], made["value"])
    return made


def _prefix(maker: Maker, pages: list[int]) -> KVPart:
    """Pages that one group of all queries sees."""
    workload = maker.workload
    return KVPart(
        page_table=maker.integers(pages)[None],
        seq_lens=maker.integers([workload.shared]),
        cu_seqlens_q=maker.integers([0, workload.tokens]),
        max_seqlen_q=workload.tokens,
        max_seqlen_k=workload.shared,
    )


def slots_of(page_table: Tensor, length: int, page_size: int) -> Tensor:
    """int64 [S_k]: where the keys of a sequence are. page_table: its row."""
    token = torch.arange(length, device=page_table.device)
    return page_table.long()[token // page_size] * page_size + token % page_size
