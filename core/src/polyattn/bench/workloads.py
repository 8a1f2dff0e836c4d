"""This module makes what is measured from a row of a sheet: the request that a program or an engine would make, and its
lengths."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..contract import AttentionRequest
from ..contract.request import relation
from ..dispatch.device_facts import device_facts
from ..serving import AttentionLayer, KVCacheConfig
from ..serving.attention.phases import ServingPhase, layer_request
from ..serving.kv_cache.storage import formats
from .measure import Inputs, Workload, make_inputs
from .rows import Row

__all__ = ["inputs_of", "workload"]

LATENT_SCALE = 192**-0.5
"""Of the uncompressed heads of DeepSeek's models, 128 + 64 wide (S2)."""
TREE_WIDTH = 4
_LARGE = 2**31


def workload(row: Row, device: torch.device) -> Workload:
    """The row as polyattn is asked for it on a device.

    Raises:
        ConfigError: its cache cannot be kept so. InvalidInputError: no layer of a serving engine is like it.
    """
    if row.kind == "packed":
        lengths = tuple((n, n) for n in row.lengths)
    else:
        lengths = ((row.q_len, row.keys - row.shared),) * row.batch
    request = _served(row, device) if row.serving else _called(row, device)
    return Workload(request, lengths, row.shared)


def inputs_of(row: Row, asked: Workload, device: torch.device, sets: int | None = None) -> Inputs:
    """The tensors of a row; `asked` is its workload.

    Raises:
        UnsupportedRequestError: no inputs are made for such a request.
    """
    return make_inputs(asked, device, sets, density=row.density, backward_only=row.kind == "backward")


def _called(row: Row, device: torch.device) -> AttentionRequest:
    """Return the workload of a call with whole keys and values."""
    packed = row.kind == "packed"
    fields: dict[str, Any] = {"family": "dense", "layout": "BSHD", "s_relation": relation(row.q_len, row.keys)}
    if packed:
        fields = {"family": "varlen", "layout": "THD"}
    if row.kind == "block_sparse":
        fields = {"family": "block_sparse", "layout": "BHSD", "block_map": True, "block_shape": (row.block, row.block)}
    if row.kind in ("training", "backward"):
        fields["grad"] = ("query", "key", "value")
    tokens = (sum(row.lengths),) * 2 if packed else (row.batch * row.q_len, row.batch * row.keys)
    widest = max(tokens[0] * row.heads, tokens[1] * row.kv_heads) * max(row.dims)
    return AttentionRequest(
        **device_facts(device),
        **fields,
        dtype=row.dtype,
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        v_head_dim=row.v_head_dim,
        causal="bottom_right" if row.causal and row.kind != "block_sparse" else "none",
        window=row.window,
        softcap=row.softcap,
        sinks=row.sinks,
        large=widest >= _LARGE,
    ).normalised()


def _served(row: Row, device: torch.device) -> AttentionRequest:
    """Return the workload of a layer of a serving engine."""
    latent = row.kind == "latent"
    layer = AttentionLayer(
        0,
        row.heads,
        row.kv_heads,
        row.head_dim,
        row.dims[1],
        scale=LATENT_SCALE if latent else None,
        window=row.window[0],
        softcap=row.softcap,
        sinks=torch.zeros(row.heads) if row.sinks else None,
        latent=latent,
    )
    dtype = getattr(torch, row.dtype)
    pages = 1 + row.batch * math.ceil((row.kv_len - row.shared) / row.page_size) + row.shared // row.page_size
    kept = formats(layer, KVCacheConfig(row.kv_dtype, row.page_size), dtype)
    width = max(one.heads * one.stored_width for one in kept)
    stored = {
        "kv_dtype": row.kv_dtype,
        "page_size": row.page_size,
        "kv_layout": "" if latent else "NHD",
        "kv_scales": kept[0].scales,
        "large": pages * row.page_size * width >= _LARGE,
    }
    phase: ServingPhase = "verify" if row.tree else "decode" if row.q_len == 1 else "extend"
    request = layer_request(
        layer,
        stored,
        phase=phase,
        dtype=dtype,
        device=device,
        topk=TREE_WIDTH if row.tree else 0,
        recorded=row.recorded and device.type != "cpu",
    )
    return dataclasses.replace(request, kv_parts=1) if row.shared else request
