"""The kernels that serving and methods use beside attention (`polyattn.contract.DeviceOps`, `BlockOps`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .kernels import chunks, clusters, linear_branch, rows
from .kernels.dequantise import dequantised
from .kernels.index import index_scores
from .kernels.merge import merge
from .kernels.merge_parts import merge_parts
from .kernels.metadata import View, step_launches
from .kernels.short_conv import causal_conv
from .kernels.top import top_tokens
from .kernels.write import Launched, Writer, latent_parts, write_kv, write_latent

if TYPE_CHECKING:
    from polyattn.contract import StepTables

__all__ = ["BlockOps", "DeviceOps"]


class DeviceOps:
    """Rows of KV pools, quantised and with their scales, in one launch for keys and values; the tables of a step, three
    views of it in a launch; results of several ranks as one; convolutions over the tails of a pool; pages of quantised
    caches as numbers."""

    name = "polyattn-triton"
    merge = staticmethod(merge)
    merge_parts = staticmethod(merge_parts)
    index_scores = staticmethod(index_scores)
    causal_conv = staticmethod(causal_conv)
    top_tokens = staticmethod(top_tokens)
    dequantised = staticmethod(dequantised)

    def rows_writer(self, cache: Any, dtype: torch.dtype) -> Writer | None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return None
        if (latent := cache.cache) is not None:

            def write_rows(key: Tensor, value: Tensor | None, slots: Tensor, rows: bool) -> Launched | None:
                return write_latent(key, latent, slots=slots, page_size=cache.page_size)

            numbers, factors = latent_parts(latent, cache.kv_scales)
            return Writer(write_rows, (numbers, None, factors, None))
        if (key_cache := cache.key_cache) is None:
            return None

        def write(key: Tensor, value: Tensor | None, slots: Tensor, rows: bool) -> Launched | None:
            return write_kv(
                key,
                value,
                key_cache,
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

        return Writer(write, (key_cache, cache.value_cache, cache.k_scale, cache.v_scale))

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


class BlockOps:
    """Tokens in blocks, means, scores, the best of them; SLA's linear branch; clusters; chunks that queries choose."""

    name = "polyattn-triton"
    gather = staticmethod(rows.gather)
    scatter = staticmethod(rows.scatter)
    scored = staticmethod(rows.scored)
    top = staticmethod(rows.top)
    pooled = staticmethod(linear_branch.pooled)
    linear_sums = staticmethod(linear_branch.linear_sums)
    linear_add = staticmethod(linear_branch.linear_add)
    nearest = staticmethod(clusters.nearest)
    in_order = staticmethod(clusters.in_order)
    cluster_means = staticmethod(clusters.cluster_means)
    listed = staticmethod(clusters.listed)
    choose = staticmethod(chunks.choose)
    attend_chosen = staticmethod(chunks.attend_chosen)
    merge_chosen = staticmethod(chunks.merge_chosen)
