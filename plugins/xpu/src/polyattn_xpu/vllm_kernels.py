"""vllm-xpu-kernels: `vllm_xpu_kernels.flash_attn_interface.flash_attn_varlen_func`, one packed call for everything.

From its sources: the third to fifth arguments are (value, max_seqlen_q, cu_seqlens_q), not FlashAttention's; exactly
one of cu_seqlens_k and seqused_k; a configuration that is not compiled is computed by a reference in PyTorch, after a
warning, which counts a sink in the LSE and honours a softcap that the kernels ignore. It writes an LSE for calls
without pages, windows and sinks.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from polyattn.adapters import OutAndLSE, Packed, bind_flash_attention, load
from polyattn.contract import AttentionRequest, Bound, PagedTables

from .batches import Unpaged, bind_paged, idle_last
from .records.common import VLLM_XPU_KERNELS

__all__ = ["FlashAttentionVLLM", "PagedVLLM"]


def _call(request: AttentionRequest, needs: dict[str, str]) -> Any:
    target = "vllm_xpu_kernels.flash_attn_interface:flash_attn_varlen_func"
    return functools.partial(
        load(VLLM_XPU_KERNELS, target, needs),
        softmax_scale=request.softmax_scale,
        causal=request.causal != "none",
    )


def _window(request: AttentionRequest, max_seqlen_q: int) -> list[int] | None:
    """Beside a bound a missing one is max_seqlen_k there, which on the right is too few for more queries than keys."""
    left, right = request.window
    if request.window == (-1, -1):
        return None
    return [left, max_seqlen_q if right < 0 and request.causal == "none" else right]


class FlashAttentionVLLM:
    """Binds dense and varlen requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed version lacks what the request needs.
        """
        return bind_flash_attention(request, _Packed)


class _Packed(Unpaged):
    def __init__(self, request: AttentionRequest) -> None:
        super().__init__(request)
        self._call = _call(request, {"return_softmax_lse": "the LSE"} if request.lse else {})

    def attend(self, query: Tensor, key: Tensor, value: Tensor, where: Packed, lse: bool) -> OutAndLSE:
        window = _window(self.request, where.max_seqlen_q)
        tables = where._asdict()
        found = self._call(query, key, value, **tables, window_size=window, return_softmax_lse=lse)
        return found if lse else (found, None)


class PagedVLLM:
    """Binds paged requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed version lacks what the request needs.
        """
        return bind_paged(request, "vllm-xpu-kernels", _Paged)


class _Paged:
    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        needs = {"is_mix_batch": "batches of mixed lengths", "out": "out="}
        if request.sinks:
            needs["s_aux"] = "the sinks"
        if request.kv_dtype != "auto":
            needs["k_descale"] = "an FP8 cache"
        self._call = _call(request, needs)

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
        rows = query.shape[0]
        # The prefill kernel skips sequences without queries; the decode kernel does not.
        idle = where.max_seqlen_q == 1 and rows != where.seq_lens.shape[0]
        if idle:
            query, where = idle_last(query, where)
        given: dict[str, Any] = {} if sinks is None else {"s_aux": sinks}
        if scales is not None:
            given["k_descale"], given["v_descale"] = scales
        result: Tensor = self._call(
            query, key, value, block_table=where.page_table, seqused_k=where.seq_lens,
            cu_seqlens_q=where.cu_seqlens_q, max_seqlen_q=where.max_seqlen_q, max_seqlen_k=where.max_seqlen_k,
            window_size=_window(self.request, where.max_seqlen_q), is_mix_batch=False,
            out=None if idle else out, **given,
        )  # fmt: skip
        if not idle:
            return result
        return result[:rows] if out is None else out.copy_(result[:rows])
