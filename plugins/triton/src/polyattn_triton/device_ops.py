"""The kernels that a serving loop uses beside attention (`polyattn.serving.device_ops`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kernels.write import write_kv, write_latent

if TYPE_CHECKING:
    from polyattn.serving import LayerCache

__all__ = ["DeviceOps"]


def _dense(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class DeviceOps:
    """Rows of KV pools, quantised and with their scales, in one launch for keys and values."""

    name = "polyattn-triton"

    def writes(self, cache: LayerCache, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def write(self, cache: LayerCache, slots: Tensor, key: Tensor, value: Tensor | None, *, rows: bool) -> None:
        if cache.cache is not None:
            write_latent(_dense(key), cache.cache, slots=slots, page_size=cache.page_size)
        elif cache.key_cache is not None:
            write_kv(
                _dense(key),
                None if value is None else _dense(value),
                cache.key_cache,
                cache.value_cache,
                slots=slots,
                page_size=cache.page_size,
                hnd=cache.kv_layout == "HND",
                kv_dtype=cache.kv_dtype,
                kv_scales=cache.kv_scales,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
                make_scales=cache.dynamic,
                rows=rows,
            )
