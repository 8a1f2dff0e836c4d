"""The kernels that a serving loop uses beside attention (`polyattn.serving.device_ops`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kernels.metadata import View, step_launches
from .kernels.write import write_kv, write_latent

if TYPE_CHECKING:
    from polyattn.serving import LayerCache
    from polyattn.serving.device_ops import StepTables

__all__ = ["DeviceOps"]


def _dense(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class DeviceOps:
    """Rows of KV pools, quantised and with their scales, in one launch for keys and values; the tables of a step, three
    views of it in a launch."""

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

    def writer(self, tables: StepTables) -> Callable[[], None]:
        views = [
            View(view.page_size, view.window, **view.tensors, columns=view.columns)  # type: ignore[arg-type]
            for view in tables.views
        ]
        launches = step_launches(
            tables.table, tables.rows, tables.seq_lens, tables.cu_seqlens_q, page_size=tables.page_size,
            tokens=tables.tokens, columns=tables.columns, live=tables.live, lag=tables.lag,
            positions=tables.positions, slots=tables.slots, views=views,
        )  # fmt: skip
        if len(launches) == 1:
            return launches[0]

        def write() -> None:
            for launch in launches:
                launch()

        return write
