"""sgl-kernel for XPU: `sgl_kernel.flash_attn` and the latent kernels of `sgl_kernel.attention`, for Battlemage.

From its sources: keys, queries and outputs are read and written as contiguous, whatever their strides say (prefill);
with a page table and several sequences of which one has more than a query, those with one query go to the decode kernel
and the others to the prefill kernel; the LSE is allocated and never written. max_seqlen_k bounds the windows, and is 0
by default.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import OutAndLSE, Packed, bind_flash_attention, load, without_free_slots
from polyattn.contract import AttentionRequest, Bound, PagedTables, UnsupportedRequestError

from .batches import Unpaged, bind_paged, idle_last
from .records.common import SGL_KERNEL_XPU
from .visibility import blind

__all__ = ["FlashAttentionSglKernel", "LatentSglKernel", "PagedSglKernel"]

_LATENT = 512


def _load(target: str, needs: dict[str, str] | None = None) -> Any:
    return load(SGL_KERNEL_XPU, target, needs)


def _options(request: AttentionRequest) -> dict[str, Any]:
    return {
        "softmax_scale": request.softmax_scale,
        "causal": request.causal != "none",
        "window_size": request.window,
    }


class FlashAttentionSglKernel:
    """Binds dense and varlen requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed build lacks what the request needs.
        """
        return bind_flash_attention(request, _Packed)


class _Packed(Unpaged):
    def __init__(self, request: AttentionRequest) -> None:
        super().__init__(request)
        self._call = functools.partial(_load("sgl_kernel.flash_attn:flash_attn_varlen_func"), **_options(request))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, where: Packed, lse: bool) -> OutAndLSE:
        return self._call(query, key, value, **where._asdict()), None


class PagedSglKernel:
    """Binds paged requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed build lacks what the request needs.
        """
        return bind_paged(request, "sgl-kernel-xpu", _Paged)


class _Paged:
    def __init__(self, request: AttentionRequest) -> None:
        needs = {"max_seqlen_k": "windows", "out": "out="}
        if request.sinks:
            needs["sinks"] = "the sinks"
        if request.kv_dtype != "auto":
            needs["k_descale"] = "an FP8 cache"
        function = _load("sgl_kernel.flash_attn:flash_attn_with_kvcache", needs)
        self._call = functools.partial(function, **_options(request))

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        where: PagedTables,
        *,
        sinks: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if not (key.is_contiguous() and value.is_contiguous()):
            raise UnsupportedRequestError(
                f"caches of {list(key.shape)} have strides {key.stride()} and {value.stride()}, and the prefill kernel "
                f"of sgl-kernel-xpu reads pages as one contiguous block: allocate keys and values apart from each other"
            )
        rows = query.shape[0]
        ragged = rows != where.seq_lens.shape[0] * where.max_seqlen_q
        if ragged:
            query, where = idle_last(query, where)
        given: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
        if scales is not None:
            given["k_descale"], given["v_descale"] = scales
        result: Tensor = self._call(
            query, key, value, page_table=where.page_table, cache_seqlens=where.seq_lens,
            cu_seqlens_q=where.cu_seqlens_q, max_seqlen_q=where.max_seqlen_q, max_seqlen_k=where.max_seqlen_k,
            out=None if ragged else out, **given,
        )  # fmt: skip
        if not ragged:
            return result
        return result[:rows] if out is None else out.copy_(result[:rows])


class LatentSglKernel:
    """Binds mla requests: absorbed, one query for each sequence by the decode kernel, others by the prefill kernel."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed build lacks what the request needs.
        """
        return bind_flash_attention(request, _Latent)


class _Latent:
    empty = -torch.inf
    writes_out = False
    simple = None

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        self._decode = _load("sgl_kernel.attention:flash_mla_decode")
        self._room = _load("sgl_kernel.attention:flash_mla_get_workspace_size")
        self._prefill = _load("sgl_kernel.attention:flash_mla_prefill")
        self._prefill_room = _load("sgl_kernel.attention:flash_mla_prefill_get_workspace_size")

    def takes_sinks(self, sinks: Tensor, query: Tensor) -> bool:
        return False

    def latent(self, query: Tensor, cache: Tensor, where: PagedTables, *, lse: bool) -> OutAndLSE:
        rows = cache.squeeze(2)
        rows, table = self._pages(rows, where)
        one = self.request.s_relation == "one" and query.shape[0] == where.seq_lens.shape[0]
        nope, rope = query[..., :_LATENT].contiguous(), query[..., _LATENT:].contiguous()
        longest = table.shape[1] * rows.shape[1]
        sizes = {
            "max_seq_len": longest,
            "num_batches": table.shape[0],
            "num_heads": query.shape[1],
            "page_size": rows.shape[1],
        }
        given: dict[str, Any] = {
            "q_nope": nope,
            "q_pe": rope,
            "kv_c_and_k_pe_cache": rows,
            "page_table": table,
            "sm_scale": self.request.softmax_scale,
            "num_kv_splits": -1,
        }
        room = (self._room if one else self._prefill_room)(**sizes, num_kv_splits=-1)
        given["workspace"] = torch.empty(room, dtype=torch.uint8, device=query.device)
        if one:
            result = self._decode(seq_lens=where.seq_lens, **given)
        else:
            result = self._prefill(
                cu_seqlens_q=where.cu_seqlens_q, seq_lens_k=where.seq_lens, max_seqlen_q=where.max_seqlen_q,
                causal=True, **given,
            )  # fmt: skip
        hidden = blind(self.request, query, where.seq_lens, where.cu_seqlens_q)
        return result.masked_fill_(hidden[:, None, None], 0.0), None

    def _pages(self, rows: Tensor, where: PagedTables) -> tuple[Tensor, Tensor]:
        """(cache, its table): without free slots unless they are promised to be numbers, and with as many columns as
        fill whole steps of 128 tokens, which decode asks for."""
        if dict(self.request.options).get("free_slots", "any") != "finite":
            caches, where = without_free_slots(self.request, (rows.unsqueeze(2),), where)
            rows = caches[0].squeeze(2)
        table, step = where.page_table, max(128 // rows.shape[1], 1)
        missing = -table.shape[1] % step
        table = torch.nn.functional.pad(table, (0, missing)) if missing else table
        return rows.contiguous(), table.contiguous()
