"""This module is vLLM's attention backend POLYATTN: dense models over paged caches.

vLLM imports it when the name is chosen. What its classes are asked, and in which order, is said in docs/hosts.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from ...errors import UnsupportedRequestError
from ...serving.layer import AttentionLayer
from ..common.capabilities import reasons_against
from ..common.steps import HostStep, attend, requests_of, write_rows
from . import NAME, device, refused

__all__ = ["PolyattnBackend", "PolyattnBuilder", "PolyattnImpl", "PolyattnMetadata"]

_FP8 = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
"""vLLM's word for the dtype of a cache -> polyattn's."""
_TORCH = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_PAGES = (16, 32, 64, 128, 256)


class PolyattnBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks before a layer is built."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_FP8]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The member of its registry."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[PolyattnImpl]:
        """The class of a layer's calls."""
        return PolyattnImpl

    @staticmethod
    def get_builder_cls() -> type[PolyattnBuilder]:
        """The class that makes metadata."""
        return PolyattnBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """The page sizes that are served here, for the layers of a spec where there is one."""
        usual: dict[str, Any] = {"head_size": 128, "dtype": torch.bfloat16, "num_kv_heads": 1}
        found = {name: getattr(kv_cache_spec, name, value) for name, value in usual.items()}
        layer = AttentionLayer(0, found["num_kv_heads"], found["num_kv_heads"], found["head_size"])
        dtype = found["dtype"] if found["dtype"].itemsize > 1 else torch.bfloat16
        sizes = [size for size in _PAGES if not _reasons(layer, dtype, size)]
        return [MultipleOf(16)] if len(sizes) == len(_PAGES) else sizes or [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks are a layer's own tensor."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """A window is part of every request."""
        return True

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """Say why a configuration is not served: vLLM's own rules, then the rows that judge polyattn's calls."""
        reasons: list[str] = super().validate_configuration(**asked)
        if reasons:
            return reasons
        heads = asked.get("num_heads") or 1
        layer = AttentionLayer(
            0, heads, 1, asked["head_size"], window=127 if asked.get("has_sliding_window") else -1,
            sinks=torch.zeros(heads) if asked.get("has_sink") else None,
        )  # fmt: skip
        return list(
            _reasons(layer, asked["dtype"], asked.get("block_size") or 16, asked.get("kv_cache_dtype") or "auto")
        )


def _reasons(layer: AttentionLayer, dtype: torch.dtype, page_size: int, kv_dtype: str = "auto") -> tuple[str, ...]:
    kv = _FP8.get(kv_dtype, "auto")
    return reasons_against(requests_of(layer, dtype=dtype, device=device(), page_size=page_size, kv_dtype=kv))


@dataclasses.dataclass
class PolyattnMetadata(HostStep):
    """A step, as all layers of a group share it. `slot_mapping`: the name under which vLLM's wrappers look for and put
    the slots."""

    slot_mapping: Any = None


class PolyattnBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the metadata of a step, once for all layers of a group."""

    # Calls choose by the lengths of a step, which a graph of the whole step would freeze; graphs between attentions go.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PolyattnMetadata:
        """Return what vLLM knows of a step in polyattn's words."""
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedRequestError(
                f"vLLM asks for causal={common.causal!r} in a step over paged caches, and {NAME} serves causal steps; "
                f"choose another --attention-backend for this model",
                {NAME: ["steps that are not causal"]},
            )
        return PolyattnMetadata(
            page_table=common.block_table_tensor[: common.num_reqs],
            seq_lens=common.seq_lens[: common.num_reqs],
            cu_seqlens_q=common.query_start_loc[: common.num_reqs + 1],
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
            slots=common.slot_mapping,
            tokens=common.num_actual_tokens,
            slot_mapping=common.slot_mapping,
        )


class PolyattnImpl(AttentionImpl):  # type: ignore[misc]
    """A layer's calls.

    Raises:
        UnsupportedRequestError: the layer asks for what vLLM's questions do not cover and polyattn does not serve
            through this backend.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **extra: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise refused("attn_type", attn_type, NAME)
        for name, value in extra.items():
            if value not in (None, False, -1):
                raise refused(name, value, NAME)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks
        # vLLM counts a window with the current token, polyattn the keys before it.
        self.layer = AttentionLayer(
            0, num_heads, self.num_kv_heads, head_size, scale=self.scale, softcap=float(logits_soft_cap or 0.0),
            window=-1 if sliding_window is None else sliding_window - 1, sinks=sinks,
        )  # fmt: skip

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store the new keys and values.

        Args:
            key, value: [T, H_kv, D | D_v]. kv_cache: [pages, H_kv, page_size, D + D_v]. slot_mapping: int64 [T].
        """
        tokens = slot_mapping.shape[0]
        scales = (layer._k_scale, layer._v_scale) if self.kv_cache_dtype in _FP8 else (None, None)
        for cache, rows, scale in zip(self._caches(kv_cache), (key, value), scales, strict=True):
            write_rows(cache, slot_mapping, rows[:tokens], scale)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: PolyattnMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend the cache, into `output` [T, H_q, D_v]; of a step without metadata, which only measures, zeros."""
        if output_scale is not None or output_block_scale is not None:
            raise refused("output_scale", "a quantised output", NAME)
        if attn_metadata is None:
            return output.zero_()
        tokens = attn_metadata.tokens
        key_cache, value_cache = self._caches(kv_cache)
        more: dict[str, Any] = {}
        if self.kv_cache_dtype in _FP8:
            more = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        if self.alibi is not None:
            self.alibi = self.alibi.to(query.device)
            more["alibi"] = self.alibi
        shape = (tokens, self.num_heads, -1)
        out = output[:tokens].view(shape)
        attend(attn_metadata, self.layer, query[:tokens].view(shape), key_cache, value_cache, out=out, **more)
        return output

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The two caches as [pages, page_size, H_kv, D | D_v]: keys and values of a head lie side by side."""
        cache = kv_cache.transpose(1, 2)
        if self.kv_cache_dtype in _FP8:
            cache = cache.view(_TORCH[_FP8[self.kv_cache_dtype]])
        return cache[..., : self.head_size], cache[..., self.head_size :]
