"""Dense, packed and paged batches by AITER's `aiter.ops.mha`: Composable Kernel, and assembly where it is faster.

From its sources (aiter/ops/mha.py, csrc/py_itfs_ck): layouts, alignment and windows are FlashAttention's; a row without
keys has out = 0 and LSE = -inf; the LSE is natural, float32, [B, H_q, S_q] or [H_q, T_q], and asked for. What it says
less loudly, and what is done about it here:

- bfloat16 with D_v = 128, and the backward of most widths, goes to assembly kernels. They take no sinks, which are
  dropped, and a window of 0 keys counts as none. ALiBi slopes of 0 change no result and keep a call off them.
- The packed backward knows no softcap, and neither do the Triton kernels of a build without Composable Kernel.
- `mha_batch_prefill_func` reads the page list, and the pages in it, up to a whole tile past a sequence's last key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import OutAndLSE, Packed, bind_dropout, bind_flash_attention, keywords, load
from polyattn.contract import AttentionRequest, BackendUnavailableError, Bound, PagedTables
from polyattn.semantics.masks import may_have_empty_rows

from ..records.common import AITER
from .tokens import token_lists

__all__ = ["AiterMHA", "bind_mha"]

_MODULE = "aiter.ops.mha"
_ASSEMBLY = ((128, 128), (192, 128))
"""(D, D_v) of the assembly kernels, which are for bfloat16."""


class AiterMHA:
    """Binds dense and varlen requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed build lacks what the request needs.
        """
        return bind_mha(request)


def bind_mha(request: AttentionRequest) -> Bound:
    """A dense, varlen or paged request."""
    return _dropping(request) if request.dropout else bind_flash_attention(request, _Kernels)


def _load(name: str, needs: Mapping[str, str] | None = None) -> Callable[..., Any]:
    return load(AITER, f"{_MODULE}:{name}", needs)


def _options(request: AttentionRequest) -> dict[str, Any]:
    """What every forward is told; the softcap has a name of its own, and no dense forward knows it."""
    options = {
        "softmax_scale": request.softmax_scale,
        "causal": request.causal != "none",
        "window_size": request.window,
    }
    return options if request.family == "dense" else {**options, "logits_soft_cap": request.softcap}


class _Kernels:
    empty = -torch.inf

    def __init__(self, request: AttentionRequest) -> None:
        self._request, given = request, _options(request)
        self._assembly = request.dtype == "bfloat16" and request.dims in _ASSEMBLY and request.family != "paged"
        # Of rows without keys only the sources of Composable Kernel tell. A packed sequence may have none.
        keyless = request.family == "varlen" and request.s_relation in ("one", "more")
        self._odd = request.window[0] == 0 >= request.window[1] or keyless or may_have_empty_rows(request)
        # With a softcap no assembly is chosen.
        self._kept_off = self._assembly and self._odd and not request.softcap
        self.writes_out = request.family != "dense"
        self.simple: Callable[..., Tensor] | None = None
        needs = {"logits_soft_cap": "a softcap"} if request.softcap else {}
        names = {"dense": "flash_attn_func", "varlen": "flash_attn_varlen_func", "paged": "mha_batch_prefill_func"}
        name = names[request.family]
        self._forward = functools.partial(_load(name, {"return_lse": "the LSE", **needs}), **given)
        self._takes_sinks = "sink_ptr" in keywords(self._forward.func)
        if request.family == "dense" and not self._kept_off:
            self.simple = self._forward
        _check_build(request)
        if request.grad:
            backward = "_flash_attn_backward" if request.family == "dense" else "_flash_attn_varlen_backward"
            self._backward = _load(backward, {"window_size_left": "the backward"})

    def takes_sinks(self, sinks: Tensor, query: Tensor) -> bool:
        return self._takes_sinks and (self._kept_off or not self._assembly)

    def dense(self, query: Tensor, key: Tensor, value: Tensor, *, lse: bool, sinks: Tensor | None = None) -> OutAndLSE:
        return self._run((query, key, value), {}, lse, sinks)

    def packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        where: Packed,
        *,
        lse: bool,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> OutAndLSE:
        return self._run((query, key, value), {**where._asdict(), "out": out}, lse, sinks)

    def paged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        where: PagedTables,
        *,
        lse: bool,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> OutAndLSE:
        caches, lists = token_lists((key, value), where)
        given = {
            "cu_seqlens_q": where.cu_seqlens_q,
            "kv_indptr": lists.indptr,
            "kv_page_indices": lists.indices,
            "max_seqlen_q": where.max_seqlen_q,
            "max_seqlen_k": where.max_seqlen_k,
            "out": out,
        }
        return self._run((query, *(cache.squeeze(1) for cache in caches)), given, lse, sinks)

    def _run(self, tensors: tuple[Tensor, ...], given: dict[str, Any], lse: bool, sinks: Tensor | None) -> OutAndLSE:
        if sinks is not None:
            given["sink_ptr"] = sinks.float()
        if self._kept_off:
            given["alibi_slopes"] = self._no_slopes(tensors[0])
        result = self._forward(*tensors, **given, return_lse=lse)
        return (result[0], result[1]) if lse else (result, None)

    def _no_slopes(self, query: Tensor) -> Tensor:
        return query.new_zeros(query.shape[-2], dtype=torch.float32)

    def gradient(self, *tensors: Tensor, where: Packed | None) -> tuple[Tensor, Tensor, Tensor]:
        dout, query, key, value, out, lse = tensors
        request = self._request
        dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
        given = {"dbias": None, "bias": None} if where is None else where._asdict()
        self._backward(
            dout=dout, q=query, k=key, v=value, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv, dropout_p=0.0,
            softmax_scale=request.softmax_scale,
            causal=request.causal != "none", window_size_left=request.window[0], window_size_right=request.window[1],
            alibi_slopes=self._no_slopes(query) if self._odd else None, deterministic=request.deterministic,
            **given,
        )  # fmt: skip
        return dq, dk, dv


def _check_build(request: AttentionRequest) -> None:
    """Raises:
    BackendUnavailableError: a build without Composable Kernel would drop what the request has, or cannot do it.
    """
    if not (request.softcap or request.grad or request.family == "paged"):
        return
    if getattr(load(AITER, "aiter.jit:core"), "ENABLE_CK", True):
        return
    lacks = "softcap" if request.softcap else "gradients of its own" if request.grad else "paged prefill"
    raise BackendUnavailableError(
        f"this build of amd-aiter is without Composable Kernel (aiter.jit.core.ENABLE_CK is False): its Triton kernels "
        f"have no {lacks}. Build it with ENABLE_CK=1, or name another backend"
    )


def _dropping(request: AttentionRequest) -> Bound:
    """With dropout, whose random state only the library's own autograd knows. No LSE, no softcap."""
    given = {"dropout_p": request.dropout, "deterministic": request.deterministic, "return_lse": bool(request.grad)}
    given = {**{k: v for k, v in _options(request).items() if k != "logits_soft_cap"}, **given}
    # Its autograd wants the LSE to be asked for.
    name = "flash_attn_func" if request.family == "dense" else "flash_attn_varlen_func"
    return bind_dropout(request, functools.partial(_load(name), **given))
