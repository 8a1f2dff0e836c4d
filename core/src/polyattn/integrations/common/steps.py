"""This module puts what serving hosts know of a step and of a layer into polyattn's words, once for all of them.

Hosts with paged caches hand over the same four things under names of their own: where queries start, how long each
sequence is, its pages, and the slots of the new tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...contract import AttentionRequest
from ...dispatch.paged import paged_attention
from ...serving.attention.phases import ServingPhase, layer_request
from ...serving.layer import AttentionLayer

__all__ = ["HostStep", "attend", "requests_of", "write_rows"]

_PHASES: tuple[ServingPhase, ...] = ("extend", "decode")


@dataclasses.dataclass(kw_only=True)
class HostStep:
    """A step of N sequences with T new tokens.

    Attributes:
        page_table: int32 [N, columns], the pages of each sequence. seq_lens: int32 [N], keys with the new ones.
        cu_seqlens_q: int32 [N+1], where the queries of each sequence begin. max_seqlen_q, max_seqlen_k: host ints, at
            least the longest. slots: int64 [T], page * page_size + place, -1 = padding. tokens: T without padding.
        tree: bool [N, 1, max_seqlen_q, max_seqlen_k] of a step that verifies trees of drafts: what each draft sees.
    """

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    slots: Tensor
    tokens: int
    tree: Tensor | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of polyattn's paged calls that speak of the step."""
        return {
            "page_table": self.page_table, "seq_lens": self.seq_lens, "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_q": self.max_seqlen_q, "max_seqlen_k": self.max_seqlen_k,
            **({} if self.tree is None else {"attn_mask": self.tree, "tree": True}),
        }  # fmt: skip


def requests_of(
    layer: AttentionLayer,
    *,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    kv_dtype: str = "auto",
    kv_layout: str = "NHD",
) -> list[AttentionRequest]:
    """Return what a layer asks for in prefill and in decode, to be judged before it is built.

    Args:
        dtype, device: of the queries. page_size: tokens per page. kv_dtype: auto = that of the queries; fp8 with one
            scale. kv_layout: NHD or HND, empty for latent rows.
    """
    stored: dict[str, Any] = {
        "kv_dtype": kv_dtype,
        "kv_scales": "" if kv_dtype == "auto" else "tensor",
        "page_size": page_size,
        "kv_layout": kv_layout,
    }
    return [layer_request(layer, stored, phase=phase, dtype=dtype, device=device) for phase in _PHASES]


def attend(
    step: HostStep,
    layer: AttentionLayer,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    out: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Attend the caches, which have the new tokens.

    Args:
        query: [T, H_q, D]. key_cache, value_cache: [pages, page_size, H_kv, D | D_v]. out: [T, H_q, D_v].
        more: further keywords of `polyattn.paged_attention`, such as k_scale.

    Returns:
        [T, H_q, D_v]: `out` where it was given.
    """
    found: Tensor = paged_attention(
        query, key_cache, value_cache, **step.keywords,
        causal=layer.kind == "decoder", window=(layer.window, -1), softcap=layer.softcap, sinks=layer.sinks,
        scale=layer.scale, out=out, **more,
    )  # fmt: skip
    return found


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor, scale: Tensor | None = None) -> None:
    """Store new rows. Nothing waits for the device: rows of padding go to the first place of page 0, which is nobody's.

    Args:
        cache: [pages, page_size, ...], any strides. slots: int64 [T], -1 = padding. rows: [T, ...]. scale: one
            number that the rows are divided by, where the cache is narrower than they are.
    """
    slots = slots.clamp(min=0)
    size = cache.shape[1]
    if scale is not None:
        limits = torch.finfo(cache.dtype)
        rows = (rows.float() / scale).clamp(limits.min, limits.max)
    cache[slots // size, slots % size] = rows.to(cache.dtype)
