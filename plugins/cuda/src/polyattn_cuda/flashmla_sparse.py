"""Family `mla` with lists of tokens, by FlashMLA's sparse kernels: over rows of bfloat16, and over rows of 656 bytes.

Both take places in the cache, in multiples of 128 and 64 of them, and 64 or 128 heads; lists are brought to that. They
return the natural-log LSE, +inf for a query without tokens, and take the largest unscaled logit: instead of the scale's
the queries take the sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyattn.adapters import align16, empty_result, finish_output, load
from polyattn.contract import AttentionRequest, Bound, PagedTables, Requirement
from polyattn.semantics.packed import sequence_ids

from .records.serving import FLASH_MLA, PAGE, SGL_FLASH_MLA, VLLM_FLASH_MLA

__all__ = ["FlashMLASparse", "SglFlashMLASparse", "VllmFlashMLASparse"]

_NEEDS = dict.fromkeys(("q", "kv", "indices", "sm_scale", "d_v"), "lists of tokens")
_NEEDS_OF_BYTES = dict.fromkeys(
    (
        *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"),
        *("softmax_scale", "is_fp8_kvcache", "indices"),
    ),
    "lists of tokens of FP8 rows",
)
_BLOCK, _BLOCK_OF_BYTES = 128, 64
"""Listed tokens that the kernels read at a time."""
_SEQUENCES = (227 * 1024 // 4 - 1) // 5
"""Queries of a call over rows of bytes, each a sequence of its own: what a schedule has room for."""


class FlashMLASparse:
    """Binds latent requests with lists to DeepSeek's own build."""

    requirement: ClassVar[Requirement] = FLASH_MLA
    kernels: ClassVar[Mapping[str, Any]] = {}
    """Keywords that choose among the kernels of a build."""

    def bind(self, request: AttentionRequest) -> Bound:
        kind = _OfBytes if request.kv_storage == "fp8_e4m3" else _OfRows
        return Bound(kind(self.requirement, self.kernels, request))


class SglFlashMLASparse(FlashMLASparse):
    """Binds them to SGLang's, where the kernels of these rows are the legacy ones."""

    requirement = SGL_FLASH_MLA
    kernels: ClassVar[Mapping[str, Any]] = {"use_legacy": True}


class VllmFlashMLASparse(FlashMLASparse):
    """Binds them to the copy in vLLM."""

    requirement = VLLM_FLASH_MLA


class _OfRows:
    """The forward over rows of bfloat16."""

    block = _BLOCK

    def __init__(self, requirement: Requirement, kernels: Mapping[str, Any], request: AttentionRequest) -> None:
        self._request, self._kernels = request, kernels
        scale = request.softmax_scale
        self._scale, self._sign = abs(scale) or 1.0, (scale > 0) - (scale < 0)
        self._load(requirement)

    def _load(self, requirement: Requirement) -> None:
        needs = {**_NEEDS, **dict.fromkeys(self._kernels, "this kernel")}
        self._kernel = load(requirement, f"{requirement.module}:flash_mla_sparse_fwd", needs)

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        tables: PagedTables,
        token_indices: Tensor,
        attn_mask: None = None,
        out: Tensor | None = None,
    ) -> Any:
        """A `contract.MLAForward`."""
        if not query.shape[0] or not tables.page_table.numel():
            return empty_result(self._request, query, out)
        signed = align16(query if self._sign > 0 else query * self._sign)
        result, lse = self._attend(signed, cache, self._places(tables, token_indices))
        return finish_output(self._request, result, lse.masked_fill(lse == torch.inf, -torch.inf), None, out)

    def _places(self, tables: PagedTables, token_indices: Tensor) -> Tensor:
        """int32 [T_q, keys], places in the cache, -1 = none; keys: whole blocks."""
        tokens, topk = token_indices.shape
        sequence = sequence_ids(tokens, tables.cu_seqlens_q)
        listed = torch.nn.functional.pad(token_indices, (0, -topk % self.block), value=-1)
        page = tables.page_table[sequence[:, None], (listed.clamp(min=0) // PAGE).long()]
        return torch.where(listed >= 0, page * PAGE + listed % PAGE, -1).to(torch.int32)

    def _attend(self, query: Tensor, cache: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        out, _, lse = self._kernel(
            q=query,
            kv=cache.flatten(0, 1).unsqueeze(1),
            indices=places.unsqueeze(1),
            sm_scale=self._scale,
            d_v=self._request.dims[1],
            **self._kernels,
        )
        return out, lse


class _OfBytes(_OfRows):
    """The forward over rows of 656 bytes. Each query is a sequence of one."""

    block = _BLOCK_OF_BYTES

    def _load(self, requirement: Requirement) -> None:
        needs = {**_NEEDS_OF_BYTES, **dict.fromkeys(self._kernels, "this kernel")}
        self._kernel = load(requirement, f"{requirement.module}:flash_mla_with_kvcache", needs)
        self._new_schedule = load(requirement, f"{requirement.module}:get_mla_metadata")

    def _attend(self, query: Tensor, cache: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        found = [
            self._call(some, cache, where)
            for some, where in zip(query.split(_SEQUENCES), places.split(_SEQUENCES), strict=True)
        ]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def _call(self, query: Tensor, cache: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self._kernel(
            q=query.unsqueeze(1),
            k_cache=cache.unsqueeze(2),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=self._request.dims[1],
            tile_scheduler_metadata=self._new_schedule()[0],
            softmax_scale=self._scale,
            is_fp8_kvcache=True,
            indices=places.unsqueeze(1),
            **self._kernels,
        )
        return out.squeeze(1), lse.squeeze(2)
