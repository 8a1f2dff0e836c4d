"""Dense, packed, paged and latent attention by MATE's FlashAttention, `mate.mha_interface`.

From its sources (mate 0.2.2; mha_interface.py, jit/attention/fmha, csrc/mla_pybind.mu, csrc/flash_atten_bwd.mu): masks
are bottom-right, the LSE is natural and -inf for a row without keys. With `backend="auto"` it picks between two sets of
kernels: of compiled ones, which are faster, it documents neither rows without keys nor causal masks of unequal lengths,
so these go to the ones whose source says both. A right window of 0 makes that choice fail an assertion of its own:
it is given as `causal`. Sinks are taken under a finite window alone and counted in the LSE: they are never passed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import OutAndLSE, Packed, bind_flash_attention, load
from polyattn.contract import AttentionRequest, Bound, PagedTables

from .records import MATE

__all__ = ["Flash"]

_WORKSPACE = 1 << 20
"""Bytes of schedule that the latent kernel writes: 32 for each of its parts, and 4 for each sequence on top."""


class Flash:
    """Binds dense, packed, paged and latent requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed MATE lacks what the request needs.
        """
        return bind_flash_attention(request, _Kernels)


class _Kernels:
    empty = -torch.inf
    writes_out = False
    simple: Callable[..., Tensor] | None = None

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request
        left, right = request.window
        self.causal = request.causal != "none" or right == 0
        options: dict[str, Any] = {
            "softmax_scale": request.softmax_scale,
            "causal": self.causal,
        }
        if request.family == "mla" and request.dims[1] == 512:
            # This path of theirs drops windows and softcaps without a word; no row has them.
            self._cached = functools.partial(_load("flash_attn_with_kvcache"), **options)
            return
        options |= {"window_size": (left, -1 if self.causal else right), "softcap": request.softcap}
        if request.family in ("paged", "mla"):
            self._cached = functools.partial(_load("flash_attn_with_kvcache"), **options)
            return
        options["backend"] = "auto" if _documented(request, self.causal) else "mutlass"
        self._attend = functools.partial(_load("flash_attn_varlen_func"), **options)
        if request.grad:
            self._backward = _load("_flash_attn_varlen_backward")

    def takes_sinks(self, sinks: Tensor, query: Tensor) -> bool:
        return False

    def dense(self, query: Tensor, key: Tensor, value: Tensor, *, lse: bool) -> OutAndLSE:
        return _both(self._attend(query, key, value, return_softmax_lse=lse), lse)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, where: Packed, *, lse: bool) -> OutAndLSE:
        return _both(self._attend(query, key, value, **where._asdict(), return_softmax_lse=lse), lse)

    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, where: PagedTables, *, lse: bool, **latent: Any
    ) -> OutAndLSE:
        table, seq_lens, cu_seqlens_q, max_seqlen_q = where[:4]
        result = self._cached(
            query, key, value, page_table=table, cache_seqlens=seq_lens, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, return_softmax_lse=lse, **latent,
        )  # fmt: skip
        return _both(result, lse)

    def latent(self, query: Tensor, cache: Tensor, where: PagedTables, *, lse: bool) -> OutAndLSE:
        width = self.request.dims[1]
        values, rotary = cache[..., :width], cache[..., width:]
        if width != 512:
            return self.paged(query, cache, values, where, lse=lse)
        # A schedule of its own for each call: it is written by one kernel and read by the next.
        size = _WORKSPACE + 4 * (where.seq_lens.shape[0] + 1)
        schedule = torch.empty(size, dtype=torch.uint8, device=query.device)
        extra = {"qv": query[..., :width], "scheduler_metadata": (schedule, False)}
        return self.paged(query[..., width:], rotary, values, where, lse=lse, **extra)

    def gradient(self, *tensors: Tensor, where: Packed | None) -> tuple[Tensor, Tensor, Tensor]:
        dout, query, key, value, out, lse = tensors
        assert where is not None
        dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
        self._backward(
            dout=dout, q=query, k=key, v=value, out=out, softmax_lse=_by_sequence(lse, where), dq=dq, dk=dk, dv=dv,
            **where._asdict(), dropout_p=0.0, softmax_scale=self._attend.keywords["softmax_scale"], causal=self.causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
            deterministic=self.request.deterministic,
        )  # fmt: skip
        return dq, dk, dv


def _documented(request: AttentionRequest, causal: bool) -> bool:
    """Whether the compiled kernels say what they make of it: every row sees a key, and a causal mask is square."""
    if causal:
        return request.s_relation == "equal"
    # A sequence with fewer queries than keys has some; one of a packed batch may have one query and none.
    return request.s_relation in (
        ("equal", "fewer") if request.family == "varlen" else ("equal", "fewer", "one", "more")
    )


def _load(name: str) -> Callable[..., Any]:
    return load(MATE, f"mate.mha_interface:{name}")


def _both(result: Any, lse: bool) -> OutAndLSE:
    return (result[0], result[1]) if lse else (result, None)


def _by_sequence(lse: Tensor, where: Packed) -> Tensor:
    """The LSE that the backward reads, [N, H_q, max_seqlen_q], from [H_q, T_q]: 0 past the end of a sequence."""
    starts, ends = where.cu_seqlens_q[:-1, None], where.cu_seqlens_q[1:, None]
    rows = starts + torch.arange(where.max_seqlen_q, device=lse.device)
    padded = lse[:, rows.clamp(max=lse.shape[1] - 1)].masked_fill(rows >= ends, 0.0)
    return padded.transpose(0, 1).contiguous()
