"""FlashAttention 3 on Hopper, from three builds: its own package, sgl-kernel and vLLM.

From their sources (hopper/flash_api.cpp): any page size; K and V of one width, or 192 with 128; the latent of absorbed
MLA goes in as `qv`, whose queries' rotary part is 64 wide; a row without keys has LSE = -inf. Sinks are taken in
bfloat16; others are applied from the LSE.

Pages that are multiples of a tile are loaded whole by TMA, with the rows behind a sequence's last token. Those get
weights of 0, and 0 times what is not finite is not 0: the output would depend on memory that nobody wrote. Padding
before the keys, even none of it, makes the kernel load row by row, and it is said where a tile may be that small.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import Operator, OutAndLSE, Packed, bind_flash_attention, constant_int32, dense_by_packed, load
from polyattn.contract import AttentionRequest, Bound, PagedTables

from ..records.common import FLASH_ATTN_3, SGL_KERNEL, VLLM

__all__ = [
    "FlashAttention3",
    "FlashAttention3SglKernel",
    "FlashAttention3VLLM",
    "OwnBuild",
    "SglKernelBuild",
    "VLLMBuild",
]


class FlashAttention3:
    """Of its own package, `flash_attn_interface`: the build that trains."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed build lacks what the request needs.
        """
        return bind_flash_attention(request, OwnBuild)


class FlashAttention3SglKernel:
    """Of sgl-kernel, `sgl_kernel.flash_attn`: inference, with sinks."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed build lacks what the request needs.
        """
        return bind_flash_attention(request, SglKernelBuild)


class FlashAttention3VLLM:
    """Of vLLM, the operator behind `vllm.vllm_flash_attn.flash_attn_interface`: inference, with sinks."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed build lacks what the request needs.
        """
        return bind_flash_attention(request, VLLMBuild)


_TILE = 64


class _Kernels(abc.ABC):
    """What the builds share."""

    empty = -torch.inf
    writes_out = False
    fused_sinks = False

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        self.simple: Callable[..., Tensor] | None = None
        self.options: dict[str, Any] = {
            "softmax_scale": request.softmax_scale,
            # Inside its chunk a query sees what is before it (S4).
            "causal": request.causal != "none" or request.chunk > 0,
            "softcap": request.softcap,
        }
        self.window = request.window

    def takes_sinks(self, sinks: Tensor, query: Tensor) -> bool:
        return self.fused_sinks and sinks.dtype == query.dtype == torch.bfloat16

    def padding(self, where: PagedTables) -> Tensor | None:
        """Rows before the keys, int32 [N]: none, said where TMA may be used. Its tiles have 64 rows or more either way,
        and are for more queries than one holds (tile_size.h and get_pagedkv_tma)."""
        request, seq_lens = self.request, where.seq_lens
        if request.page_size < _TILE or where.max_seqlen_q * request.group <= _TILE:
            return None
        return constant_int32(request, seq_lens.shape[0], 0, seq_lens.device)

    @abc.abstractmethod
    def packed(self, query: Tensor, key: Tensor, value: Tensor, where: Packed, *, lse: bool, **extra: Any) -> OutAndLSE:
        """As `FlashAttentionKernels.packed`."""

    @abc.abstractmethod
    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, where: PagedTables, *, lse: bool, **extra: Any
    ) -> OutAndLSE:
        """As `binding.Kernels.paged`; `qv`: of latent caches."""

    def latent(self, query: Tensor, cache: Tensor, where: PagedTables, *, lse: bool, **extra: Any) -> OutAndLSE:
        latent = self.request.dims[1]
        values = cache[..., :latent]
        if latent < 256:
            return self.paged(query, cache, values, where, lse=lse, **extra)
        rotary = query[..., latent:]
        return self.paged(rotary, cache[..., latent:], values, where, lse=lse, qv=query[..., :latent], **extra)


class _Cached(_Kernels):
    """A build with `flash_attn_with_kvcache`, which takes packed queries too."""

    @abc.abstractmethod
    def load(self, name: str, needs: dict[str, str] | None = None) -> Callable[..., Any]:
        """A function of the build, see `load`."""

    def __init__(self, request: AttentionRequest) -> None:
        super().__init__(request)
        self.options["window_size"] = request.window
        if request.family in ("paged", "mla"):
            more: dict[str, Any] = {"num_splits": 1} if request.batch_invariant else {}
            if request.chunk:
                more["attention_chunk"] = request.chunk
            self._cached = functools.partial(self.load("flash_attn_with_kvcache"), **self.options, **more)

    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, where: PagedTables, *, lse: bool, **extra: Any
    ) -> OutAndLSE:
        table, seq_lens, cu_seqlens_q, max_seqlen_q = where[:4]
        result = self._cached(
            query, key, value, page_table=table, cache_seqlens=seq_lens, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, cache_leftpad=self.padding(where), return_softmax_lse=lse, **extra,
        )  # fmt: skip
        return (result[0], result[1]) if lse else (result, None)


class OwnBuild(_Cached):
    """Of flash-attn-3."""

    def load(self, name: str, needs: dict[str, str] | None = None) -> Callable[..., Any]:
        return load(FLASH_ATTN_3, f"flash_attn_interface:{name}", needs)

    def __init__(self, request: AttentionRequest) -> None:
        super().__init__(request)
        wanted = request.lse or bool(request.grad)
        needs = {"return_attn_probs": "the LSE"} if wanted else {}
        self._asked: dict[str, Any] = {"return_attn_probs": True} if wanted else {}
        if request.family == "dense":
            self._dense = self.simple = functools.partial(self.load("flash_attn_func", needs), **self.options)
        elif request.family == "varlen":
            self._packed = functools.partial(self.load("flash_attn_varlen_func", needs), **self.options)
        if request.grad:
            self._backward = self.load("_flash_attn_backward", {"window_size_left": "the backward"})

    def dense(self, query: Tensor, key: Tensor, value: Tensor, *, lse: bool, **extra: Any) -> OutAndLSE:
        return self._both(self._dense(query, key, value, **self._asked))

    def packed(self, query: Tensor, key: Tensor, value: Tensor, where: Packed, *, lse: bool, **extra: Any) -> OutAndLSE:
        return self._both(self._packed(query, key, value, **where._asdict(), **self._asked))

    def _both(self, result: Any) -> OutAndLSE:
        return (result[0], result[1]) if self._asked else (result, None)

    def gradient(self, *tensors: Tensor, where: Packed | None) -> tuple[Tensor, Tensor, Tensor]:
        dout, query, key, value, out, lse = tensors
        left, right = self.window
        dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
        self._backward(
            dout=dout, q=query, k=key, v=value, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv,
            **({} if where is None else where._asdict()),
            softmax_scale=self.options["softmax_scale"], is_causal=self.options["causal"],
            softcap=self.options["softcap"], window_size_left=left, window_size_right=right,
            deterministic=self.request.deterministic,
        )  # fmt: skip
        return dq, dk, dv


class SglKernelBuild(_Cached):
    """Of sgl-kernel."""

    fused_sinks = True

    def load(self, name: str, needs: dict[str, str] | None = None) -> Callable[..., Any]:
        return load(SGL_KERNEL, f"sgl_kernel.flash_attn:{name}", needs)

    def __init__(self, request: AttentionRequest) -> None:
        super().__init__(request)
        if request.family in ("dense", "varlen"):
            needs = {"sinks": "the sinks"} if request.sinks else {}
            self._packed = functools.partial(self.load("flash_attn_varlen_func", needs), **self.options)
        self.dense = dense_by_packed(request, self.packed)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, where: Packed, *, lse: bool, **extra: Any) -> OutAndLSE:
        result = self._packed(query, key, value, **where._asdict(), return_softmax_lse=lse, **extra)
        return (result[0], result[1]) if lse else (result, None)


_DENSE = ("seqused_k",)
_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_PAGED = ("page_table", "seqused_k", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "leftpad_k", "q_v")


class VLLMBuild(_Kernels):
    """Of vllm. Its Python call passes everything on to this operator but batches that are not packed and padding, and
    makes room for cu_seqlens_k that nobody reads. Built for sequences of different lengths alone, it is told even equal
    ones."""

    fused_sinks = True
    writes_out = True

    def __init__(self, request: AttentionRequest) -> None:
        super().__init__(request)
        left, right = request.window
        fixed = {
            "softmax_scale": self.options["softmax_scale"],
            "is_causal": self.options["causal"],
            "window_size_left": left,
            "window_size_right": right,
            "softcap": self.options["softcap"],
            "is_rotary_interleaved": True,
            "num_splits": 1 if request.batch_invariant else 0,
            "sm_margin": 0,
            "cp_world_size": 1,
            "cp_rank": 0,
        }
        names = {"dense": _DENSE, "varlen": _PACKED}.get(request.family, _PAGED)
        needs = {"s_aux": "the sinks", "out": "out=", **dict.fromkeys(names, f"family {request.family}")}
        target = "vllm.vllm_flash_attn.flash_attn_interface:_vllm_fa3_C.fwd"
        operator = Operator(VLLM, target, fixed, needs)
        self._call, function = operator.taking(*names), operator.function

        def arguments(B: int, S_k: int, device: torch.device) -> tuple[Any, ...]:
            return operator.rest(seqused_k=constant_int32(request, B, S_k, device))

        rest = arguments if request.graph_capture else functools.lru_cache(maxsize=64)(arguments)

        def simple(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            B, S_k, _, _ = key.shape
            out: Tensor = function(query, key, value, *rest(B, S_k, key.device))[0]
            return out

        self.simple = simple

    def _attend(self, *given: Any, lse: bool, sinks: Tensor | None = None, **extra: Any) -> OutAndLSE:
        if sinks is not None:
            extra["s_aux"] = sinks
        found = self._call(*given, **extra)
        return found[0], found[1] if lse else None

    def dense(self, query: Tensor, key: Tensor, value: Tensor, *, lse: bool, **extra: Any) -> OutAndLSE:
        B, S_k = key.shape[:2]
        return self._attend(query, key, value, constant_int32(self.request, B, S_k, key.device), lse=lse, **extra)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, where: Packed, *, lse: bool, **extra: Any) -> OutAndLSE:
        return self._attend(query, key, value, *where, lse=lse, **extra)

    def paged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        where: PagedTables,
        *,
        lse: bool,
        qv: Tensor | None = None,
        **extra: Any,
    ) -> OutAndLSE:
        return self._attend(query, key, value, *where[:5], self.padding(where), qv, lse=lse, **extra)
