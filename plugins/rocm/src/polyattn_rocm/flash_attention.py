"""FlashAttention 2 on ROCm: `flash_attn.flash_attn_interface` over Composable Kernel, or over Triton kernels of AMD's.

Which of them is the library's own choice: FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE when it was built and when it runs is
Triton. Its releases (to 2.8) have those kernels with them, newer source takes AITER's. From their sources, and from
running both under Triton's interpreter (tests/vendor_code.py):

- Composable Kernel's takes a softcap and does nothing with it (csrc/flash_attn_ck/*.cpp), AITER's refuses it
  (aiter/ops/triton/_triton_kernels/flash_attn_triton_amd/interface_v2.py): no request with one comes here.
- The releases' (flash_attn/flash_attn_triton_amd/) drops softcap and window, has LSEs of packed batches as [T_q, H_q],
  and in its backward reads `dout` by the strides of `out` and writes the gradients of keys by the strides of the keys.
- The LSE of a row without keys is 0 or -inf in both, depending on its neighbours; both backwards are given 0 for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import OutAndLSE, Packed, bind_dropout, bind_flash_attention, load
from polyattn.contract import AttentionRequest, BackendUnavailableError, Bound
from polyattn.semantics.masks import may_have_empty_rows

from .records.common import FLASH_ATTN, FLASH_ATTN_TRITON

__all__ = ["FlashAttention2", "FlashAttention2Triton"]

_MODULE = "flash_attn.flash_attn_interface"
_CK = "flash_attn_2_cuda"
_RELEASED_TRITON = "flash_attn.flash_attn_triton_amd.interface_fa"


class FlashAttention2:
    """Binds dense and varlen requests to a build of Composable Kernel."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed version lacks what the request needs.
        """
        if (kernels := _kernels()) != _CK:
            raise BackendUnavailableError(
                f"flash-attn is built with {_CK} and runs {kernels}, which drops windows, softcaps and more: unset "
                "FLASH_ATTENTION_TRITON_AMD_ENABLE, or name another backend"
            )
        if not request.dropout:
            return bind_flash_attention(request, _Kernels)
        given = {"dropout_p": request.dropout, "deterministic": request.deterministic}
        return bind_dropout(request, functools.partial(_load(_FUNCTIONS[request.family]), **_options(request), **given))


class FlashAttention2Triton:
    """Binds dense and varlen requests to either Triton build."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: flash-attn cannot be imported here.
        """
        return bind_flash_attention(request, _ReleasedTriton if _kernels() == _RELEASED_TRITON else _Kernels)


def _kernels() -> str:
    """The module that the library's functions call."""
    library = load(FLASH_ATTN_TRITON, "flash_attn:flash_attn_interface")
    kernels = getattr(library, "flash_attn_gpu", None)
    return _CK if kernels is None else str(kernels.__name__)


_FUNCTIONS = {"dense": "flash_attn_func", "varlen": "flash_attn_varlen_func"}


def _load(name: str) -> Callable[..., Any]:
    return load(FLASH_ATTN, f"{_MODULE}:{name}")


def _options(request: AttentionRequest) -> dict[str, Any]:
    return {
        "softmax_scale": request.softmax_scale,
        "causal": request.causal != "none",
        "window_size": request.window,
    }


class _Kernels:
    empty = -torch.inf
    writes_out = False
    tokens_first = False
    """The LSE of a packed batch is [T_q, H_q]."""

    def __init__(self, request: AttentionRequest) -> None:
        self._request = request
        # A packed sequence may have no keys. With a right window bound there are as many keys as queries, or more.
        keyless = request.family == "varlen" and request.s_relation in ("one", "more")
        self._empties = keyless or may_have_empty_rows(request)
        self._forward = functools.partial(_load(_FUNCTIONS[request.family]), **_options(request))
        self.simple: Callable[..., Tensor] | None = self._forward if request.family == "dense" else None
        if request.grad:
            self._backward = _load(
                "_flash_attn_backward" if request.family == "dense" else "_flash_attn_varlen_backward"
            )

    def takes_sinks(self, sinks: Tensor, query: Tensor) -> bool:
        return False

    def dense(self, query: Tensor, key: Tensor, value: Tensor, *, lse: bool) -> OutAndLSE:
        result = self._forward(query, key, value, return_attn_probs=lse)
        if not lse:
            return result, None
        if not self._empties:
            return result[0], result[1]
        row = torch.arange(query.shape[1], device=query.device)
        return result[0], result[1].masked_fill(row + key.shape[1] < query.shape[1], -torch.inf)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, where: Packed, *, lse: bool) -> OutAndLSE:
        result = self._forward(query, key, value, **where._asdict(), return_attn_probs=lse)
        if not lse:
            return result, None
        found = result[1].T if self.tokens_first else result[1]
        if not self._empties:
            return result[0], found
        token = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)
        ends = where.cu_seqlens_q[1:].contiguous()
        sequence = torch.searchsorted(ends, token, right=True)
        keys = where.cu_seqlens_k.diff()[sequence]
        sees = keys + token - ends[sequence] >= 0 if self._request.causal != "none" else keys > 0
        return result[0], found.masked_fill(~sees, -torch.inf)

    def gradient(self, *tensors: Tensor, where: Packed | None) -> tuple[Tensor, Tensor, Tensor]:
        dout, query, key, value, out, lse = tensors
        request = self._request
        left, right = request.window
        if self._empties:
            lse = lse.masked_fill(lse == -torch.inf, 0.0)
        if where is not None and self.tokens_first:
            lse = lse.T.contiguous()
        dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
        options = {name: value for name, value in _options(request).items() if name != "window_size"}
        self._backward(
            dout=dout, q=query, k=key, v=value, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv,
            **({} if where is None else where._asdict()), **options, window_size_left=left, window_size_right=right,
            dropout_p=0.0, softcap=0.0, alibi_slopes=None, deterministic=request.deterministic,
        )  # fmt: skip
        return dq, dk, dv


class _ReleasedTriton(_Kernels):
    """Those of flash-attn's releases."""

    tokens_first = True

    def gradient(self, *tensors: Tensor, where: Packed | None) -> tuple[Tensor, Tensor, Tensor]:
        return super().gradient(*(t.contiguous() for t in tensors), where=where)
