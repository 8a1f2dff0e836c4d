"""This module is vLLM's attention backend POLYATTN_MLA: decode of latent attention over paged rows.

The layer around it is vLLM's own: it splits prefill from decode, absorbs the up-projections, and attends prompts as
dense heads by its backend of prefill.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonImpl
from vllm.v1.attention.backend import AttentionType, MultipleOf

from ...dispatch.paged import mla_attention
from ...errors import UnsupportedRequestError
from ...serving.layer import AttentionLayer
from ..common.capabilities import reasons_against
from ..common.steps import requests_of, write_rows
from . import MLA, device, refused

__all__ = ["PolyattnMLABackend", "PolyattnMLAImpl"]

_ROPE = 64
"""The rotary part of a latent row in every model that vLLM serves so: its questions name the whole row only."""


class PolyattnMLABackend(MLACommonBackend):  # type: ignore[misc]
    """What vLLM asks before a layer is built."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The member of its registry."""
        return MLA

    @staticmethod
    def get_impl_cls() -> type[PolyattnMLAImpl]:
        """The class of a layer's calls."""
        return PolyattnMLAImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """The page sizes that are served here, of those that are usual."""
        usual = (16, 32, 64, 128)
        sizes = [size for size in usual if not _reasons(128, 512 + _ROPE, torch.bfloat16, size)]
        return [MultipleOf(16)] if len(sizes) == len(usual) else sizes or [MultipleOf(16)]

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """Say why a configuration is not served: vLLM's own rules, then the rows that judge polyattn's calls."""
        reasons: list[str] = super().validate_configuration(**asked)
        if reasons:
            return reasons
        return list(_reasons(128, asked["head_size"], asked["dtype"], asked.get("block_size") or 64))


def _reasons(heads: int, width: int, dtype: torch.dtype, page_size: int) -> tuple[str, ...]:
    layer = AttentionLayer(0, heads, 1, width, width - _ROPE, scale=width**-0.5, latent=True)
    asked = requests_of(layer, dtype=dtype, device=device(), page_size=page_size, kv_layout="")
    # Prompts are attended as dense heads, by vLLM's own backend of prefill.
    return reasons_against([request for request in asked if request.phase == "decode"])


class PolyattnMLAImpl(MLACommonImpl):  # type: ignore[misc]
    """A layer's calls.

    Raises:
        UnsupportedRequestError: the layer asks for what latent attention has not.
    """

    can_return_lse_for_decode = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latent: Any,
    ) -> None:
        given = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        if asked := [name for name, value in given.items() if value]:
            raise refused(asked[0], given[asked[0]], MLA)
        if attn_type != AttentionType.DECODER:
            raise refused("attn_type", attn_type, MLA)
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **latent,
        )  # fmt: skip

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Store the new rows.

        Args:
            kv_c_normed: [T, D_c]. k_pe: [T, 1, D_r]. kv_cache: [pages, page_size, D_c + D_r]. slot_mapping: int64 [T].
        """
        if kv_cache.numel():
            slots = slot_mapping.flatten()
            rows = torch.cat([kv_c_normed, k_pe.squeeze(1)], dim=-1)[: len(slots)]
            write_rows(kv_cache, slots, rows)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend the cached rows.

        Args:
            q: [T, H, D_c + D_r], or its two parts; the same number of new tokens for each sequence.
            kv_c_and_k_pe_cache: [pages, page_size, D_c + D_r].

        Returns:
            (out [T, H, D_c], lse fp32 [T, H], natural).
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        sequences = decode.seq_lens.shape[0]
        new, left = divmod(query.shape[0], sequences)
        if left or (new > 1 and not attn_metadata.causal):
            raise UnsupportedRequestError(
                f"{query.shape[0]} new tokens of {sequences} sequences, causal={attn_metadata.causal}, reached {MLA}, "
                f"which serves as many for each, in causal steps; choose another --attention-backend",
                {MLA: ["steps that are not uniform and causal"]},
            )
        starts = torch.arange(sequences + 1, dtype=torch.int32, device=query.device) * new
        out, lse = mla_attention(
            query, kv_c_and_k_pe_cache, page_table=decode.block_table, seq_lens=decode.seq_lens, cu_seqlens_q=starts,
            max_seqlen_q=new, max_seqlen_k=attn_metadata.max_seq_len, scale=self.scale, v_head_dim=self.kv_lora_rank,
            return_lse=True,
        )  # fmt: skip
        return out, lse
