"""What the kernels of both GPU libraries need around their calls.

From their sources: a row that sees no key is not written, or divides by 0; a decode kernel takes every sequence for one
with a query, and writes the result of one without into the row where it would be; masked values are multiplied by 0.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import (
    OutAndLSE,
    Packed,
    append_new_kv,
    dense_by_packed,
    empty_result,
    with_positive_scale,
    without_free_slots,
)
from polyattn.contract import AttentionRequest, Bound, PagedTables, UnsupportedRequestError

from .visibility import blind

__all__ = ["Pages", "Unpaged", "bind_paged", "idle_last"]

Pages = Callable[..., Tensor]
"""(query [T_q, H_q, D], keys, values [pages, page_size, H_kv, D], `PagedTables`, sinks=, scales=, out=) -> output."""


def idle_last(query: Tensor, where: PagedTables) -> tuple[Tensor, PagedTables]:
    """The same batch with its sequences without queries last, and a spare row of queries behind the others: where a
    decode kernel writes the results of those. Results of the first T_q rows are the batch's."""
    lengths = where.cu_seqlens_q.diff()
    order = torch.argsort((lengths == 0).int(), stable=True)
    starts_q = torch.nn.functional.pad(lengths[order].cumsum(0, dtype=torch.int32), (1, 0))
    last = where.changed(page_table=where.page_table[order], seq_lens=where.seq_lens[order], cu_seqlens_q=starts_q)
    return torch.nn.functional.pad(query, (0, 0, 0, 0, 0, 1)), last


class Unpaged(abc.ABC):
    """`polyattn.adapters.FlashAttentionKernels` of dense and varlen requests. A library says its packed call."""

    empty = -torch.inf
    writes_out = False
    simple = None

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        self.dense = dense_by_packed(request, self.packed)

    @abc.abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, where: Packed, lse: bool) -> OutAndLSE:
        """The library's call, of contiguous tensors."""

    def takes_sinks(self, sinks: Tensor, query: Tensor) -> bool:
        return False

    def packed(self, query: Tensor, key: Tensor, value: Tensor, where: Packed, *, lse: bool) -> OutAndLSE:
        result, stats = self.attend(query.contiguous(), key.contiguous(), value.contiguous(), where, lse)
        if self.request.s_relation != "equal":
            hidden = blind(self.request, query, where.cu_seqlens_k.diff(), where.cu_seqlens_q)
            result = result.masked_fill_(hidden[:, None, None], 0.0)
            stats = None if stats is None else stats.masked_fill_(hidden, -torch.inf)
        return result, stats


def bind_paged(request: AttentionRequest, library: str, pages: Callable[[AttentionRequest], Pages]) -> Bound:
    """A paged request served by the `Pages` that `pages` loads for it."""
    return with_positive_scale(request, lambda positive: _paged(positive, library, pages(positive)))


def _paged(request: AttentionRequest, library: str, attend: Pages) -> Bound:
    finite = dict(request.options).get("free_slots", "any") == "finite"

    def forward(
        query: Tensor,
        *caches: Tensor,
        tables: PagedTables,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        if not (query.shape[0] and tables.max_seqlen_k):
            return empty_result(request, query, out)
        if sinks is not None and sinks.dtype != query.dtype:
            raise UnsupportedRequestError(
                f"sinks are {sinks.dtype}, and the kernels of {library} read them as {query.dtype}, like the queries: "
                f"pass sinks.to({query.dtype}), or ask for flex_attention, which takes them as they are"
            )
        if key is not None:
            new = (_unscaled(key, k_scale), _unscaled(value, v_scale))
            caches, tables = append_new_kv(request, query, caches, tables, *new)
        if not finite:
            caches, tables = without_free_slots(request, caches, tables)
        tables = tables.changed(page_table=tables.page_table.contiguous())
        given: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
        if request.kv_dtype != "auto":
            given["scales"] = (_scalar(k_scale, query.device), _scalar(v_scale, query.device))
        room = out if out is not None and out.is_contiguous() else None
        result = attend(query.contiguous(), *caches, tables, out=room, **given)
        result = result.masked_fill_(blind(request, query, tables.seq_lens, tables.cu_seqlens_q)[:, None, None], 0.0)
        return result if out is None or room is not None else out.copy_(result)

    return Bound(forward)


def _unscaled(rows: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """New rows as a cache with this scale stores them, but for the rounding."""
    return rows if rows is None or scale is None else rows.float() / scale


def _scalar(scale: Tensor | None, device: torch.device) -> Tensor:
    """float32 [1] with a storage of its own, which vllm-xpu-kernels asks for; a cache without a scale has 1."""
    if scale is None:
        return torch.ones(1, dtype=torch.float32, device=device)
    scale = scale.float().reshape(1)
    return scale if scale.untyped_storage().nbytes() == scale.element_size() else scale.clone()
