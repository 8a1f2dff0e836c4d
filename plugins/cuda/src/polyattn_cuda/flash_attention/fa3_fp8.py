"""FlashAttention 3 over e4m3 caches, multiplied as they are: queries and attention weights are rounded to e4m3 as well.

A backend of its own, by name only: what `fa3` makes of such a cache is exact. Queries have one scale for each sequence
and KV head, the largest of their numbers over the largest of e4m3; the kernel's output is bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import append_new_kv, empty_result, with_positive_scale
from polyattn.contract import AttentionRequest, Bound, PagedTables
from polyattn.semantics.kv_quant import stored
from polyattn.semantics.paged_kv import Tokens

from . import fa3

__all__ = ["FlashAttention3FP8", "FlashAttention3FP8SglKernel", "FlashAttention3FP8VLLM"]

_E4M3 = torch.float8_e4m3fn


class FlashAttention3FP8:
    """By the build of its own package."""

    build: Callable[[AttentionRequest], Any] = fa3.OwnBuild

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed build lacks what the request needs.
        """
        return with_positive_scale(request, lambda positive: _bind(positive, type(self).build))


class FlashAttention3FP8SglKernel(FlashAttention3FP8):
    """By sgl-kernel's."""

    build = fa3.SglKernelBuild


class FlashAttention3FP8VLLM(FlashAttention3FP8):
    """By vLLM's."""

    build = fa3.VLLMBuild


def _bind(request: AttentionRequest, build: Callable[[AttentionRequest], Any]) -> Bound:
    kernel = build(dataclasses.replace(request, kv_dtype="auto", kv_scales="")).paged
    swapped = request.kv_layout == "HND"

    def forward(
        query: Tensor,
        *caches: Tensor,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: None = None,
        sinks: None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        if not (query.shape[0] and tables.max_seqlen_k):
            return empty_result(request, query, out)
        if key is not None:
            new = (_unscaled(key, k_scale), _unscaled(value, v_scale))
            caches, tables = append_new_kv(request, query, caches, tables, *new)
        if swapped:
            caches = tuple(cache.transpose(1, 2) for cache in caches)
        rounded, q_descale = _rounded(request, query, tables)
        descales = {"q_descale": q_descale}
        for name, scale in (("k_descale", k_scale), ("v_descale", v_scale)):
            if scale is not None:
                descales[name] = scale.float().reshape(1, -1).expand(q_descale.shape)
        result, lse = kernel(rounded, *caches, tables, lse=request.lse, **descales)
        result = result.to(query.dtype) if out is None else out.copy_(result)
        return (result, lse.transpose(0, 1)) if request.lse else result

    return Bound(forward)


def _unscaled(rows: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """Rows [T_q, H_kv, D] as the cache stores them: over its scale, one number or one for each head."""
    return rows if rows is None or scale is None else rows.float() / scale.reshape(-1, 1)


def _rounded(request: AttentionRequest, query: Tensor, tables: PagedTables) -> tuple[Tensor, Tensor]:
    """Queries in e4m3 and their scales, float32 [N, H_kv]."""
    tokens = Tokens.of(query, tables)
    grouped = torch.unflatten(query, 1, (request.kv_heads, -1))
    largest = grouped.abs().amax((-1, -2)).float()
    scale = largest.new_zeros(tables.seq_lens.shape[0], request.kv_heads)
    scale.scatter_reduce_(0, tokens.sequence[:, None].expand_as(largest), largest, "amax")
    scale = (scale / torch.finfo(_E4M3).max).clamp(min=torch.finfo(torch.float32).tiny)
    return stored(grouped, scale[tokens.sequence][..., None, None], _E4M3).flatten(1, 2), scale
