"""`mate.mha_interface`: FlashAttention for MUSA.

docs/flash_attention.md: fp16 and bf16, any head dim up to 512, any page size, masks `None`, `Causal`, `Local`, a sink
on the local path only. mate/jit/attention/fmha/fmha_fwd.py: the checks, and that a sink is bfloat16; fmha_utils.py:
`_resolve_mask`; include/mate/attention/fmha: mask.hpp (bottom-right), epilogue_fwd.hpp (LSE -inf and out 0 for a row
without keys), softmax.hpp (natural LSE, the sink in it). mate/mha_interface.py: how `auto` chooses, and the assertions
behind it. csrc/mla_pybind.mu: the latent kernel. csrc/flash_atten_bwd.mu: the backward.

What is documented nowhere is poison here: what the compiled kernels ("mubin") make of rows without keys and of causal
masks of unequal lengths, and what the backward makes of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.testing.emulators import Library
from polyattn.testing.emulators.arithmetic import band, gradients, lse_of, scores, weighted, weights_of

from . import SIGNATURES

__all__ = ["library"]

MODULE = "mate.mha_interface"
POISON = float("nan")


class Mask(NamedTuple):
    """What a sequence of S_q queries sees of S_k keys; bounds of -1 are off."""

    causal: bool
    left: int = -1
    right: int = -1

    @property
    def local(self) -> bool:
        return self.left >= 0 or (self.right > 0 and not self.causal)

    def seen(self, s_q: int, s_k: int) -> Tensor:
        return band(s_q, s_k, self.left, 0 if self.causal else self.right)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, mask: Mask, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out [S_q, H_q, D_v] and LSE [H_q, S_q] of one sequence."""
    s = scores(q, k, scale, mask.seen(q.shape[0], k.shape[0]), softcap)
    lse = lse_of(s, sink)
    return weighted(weights_of(s, lse), v).to(q.dtype), lse


def check_inputs(q: Tensor, k: Tensor, v: Tensor, widest: int = 512) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16), "only supports fp16 and bf16"
    assert q.dtype == k.dtype == v.dtype, "inputs must have the same dtype"
    assert q.shape[-2] % k.shape[-2] == 0, "num_head must be divisible by num_head_kv"
    if max(q.shape[-1], v.shape[-1]) > widest:
        raise ValueError(f"Unsupported headdim {q.shape[-1]}")


def check_lengths(*tensors: Tensor | None) -> None:
    for t in tensors:
        assert t is None or (t.dtype == torch.int32 and t.stride(-1) == 1), "must be int32 and contiguous"


def sequences(starts_q: Tensor, starts_k: Tensor) -> list[tuple[slice, slice]]:
    ends = [*zip(starts_q.tolist(), starts_q.tolist()[1:], strict=False)]
    other = [*zip(starts_k.tolist(), starts_k.tolist()[1:], strict=False)]
    return [(slice(*a), slice(*b)) for a, b in zip(ends, other, strict=True)]


def library(version: str = "0.2.2") -> Library:
    lib = Library("mate", version, MODULE, signatures=SIGNATURES)
    forward(lib)
    cached(lib)
    backward(lib)
    return lib


def unused(given: dict[str, Any], *names: str) -> None:
    for name in names:
        assert given[name] is None, f"not emulated: {name}"


def forward(lib: Library) -> None:
    @lib.function(MODULE, "mate.mha_interface.flash_attn_varlen_func")
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        learnable_sink: Tensor | None,
        return_softmax_lse: bool,
        backend: str,
        **rest: Any,
    ) -> Any:
        unused(rest, "seqused_q", "seqused_k", "page_table", "qv", "out", "q_descale", "k_descale", "v_descale")
        assert not rest["attention_chunk"]
        check_inputs(q, k, v)
        check_lengths(cu_seqlens_q, cu_seqlens_k)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        left, right = window_size
        widths = (q.shape[-1], v.shape[-1])
        plain = left < 0 and right <= 0 and not softcap and learnable_sink is None
        compiled = plain and (widths == (192, 128) or (widths[0] == widths[1] <= 128))
        if backend not in ("auto", "mutlass", "mubin"):
            raise ValueError(f"Only support backend 'mutlass', 'mubin' and 'auto'! Get unknown backend {backend}!")
        compiled = backend == "mubin" or (backend == "auto" and compiled)
        if compiled:
            # `auto` lets a right window of 0 pass, and this stops it.
            assert left < 0
            assert right < 0
        mask = Mask(causal, left, right)
        if learnable_sink is not None:
            assert learnable_sink.dtype == torch.bfloat16, "learnable_sink must be bfloat16"
            assert mask.local, "a sink is taken on the local path only"
        packed = cu_seqlens_q is not None and cu_seqlens_k is not None
        if packed:
            assert max_seqlen_q is not None
            assert max_seqlen_k is not None
            parts = [(q[a], k[b], v[b]) for a, b in sequences(cu_seqlens_q, cu_seqlens_k)]
        else:
            assert q.ndim == 4
            parts = list(zip(q, k, v, strict=True))
        found = []
        for part in parts:
            out, lse = attend(*part, scale, softcap, mask, learnable_sink)
            if compiled and causal and part[0].shape[0] != part[1].shape[0]:
                out, lse = torch.full_like(out, POISON), torch.full_like(lse, POISON)
            if compiled and not part[1].shape[0]:
                out, lse = torch.full_like(out, POISON), torch.full_like(lse, POISON)
            found.append((out, lse))
        outs, lses = zip(*found, strict=True)
        result = (torch.cat(outs), torch.cat(lses, -1)) if packed else (torch.stack(outs), torch.stack(lses))
        return result if return_softmax_lse else result[0]


def cached(lib: Library) -> None:
    # The latent path reads `scheduler_metadata[0]` and `[1]`: it is a pair, whatever the annotation says.
    @lib.function(MODULE, "mate.mha_interface.flash_attn_with_kvcache", mistyped=("scheduler_metadata",))
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        qv: Tensor | None,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        learnable_sink: Tensor | None,
        scheduler_metadata: Any,
        return_softmax_lse: bool,
        **rest: Any,
    ) -> Any:
        unused(rest, "k", "v", "cache_batch_idx", "cache_leftpad", "cu_seqlens_k_new", "q_descale", "k_descale")
        assert not rest["attention_chunk"]
        assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
        assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
        check_inputs(q, k_cache, v_cache)
        check_lengths(cache_seqlens, page_table, cu_seqlens_q)
        assert max_seqlen_q is not None
        latent = qv is not None and (qv.shape[-1], q.shape[-1]) == (512, 64)
        if qv is not None:
            assert latent, "qv parameter is not supported yet"
            workspace, _ = scheduler_metadata
            if workspace.dtype != torch.uint8 or workspace.ndim != 1 or not workspace.is_contiguous():
                raise RuntimeError("workspace must be 1-D, contiguous, uint8")
            if workspace.numel() < 4 * (cache_seqlens.shape[0] + 1):
                raise RuntimeError("workspace is too small for MLA scheduler metadata")
            if k_cache.shape[1] != 64:
                raise RuntimeError("page size only supports 64")
            # This path has no arguments for them: they are lost.
            window_size, softcap = (-1, -1), 0.0
        else:
            assert scheduler_metadata is None, "not emulated"
        wide = q.shape[-1] + (0 if qv is None else qv.shape[-1])
        scale = wide**-0.5 if softmax_scale is None else softmax_scale
        mask = Mask(causal, *window_size)
        assert learnable_sink is None or mask.local, "a sink is taken on the local path only"
        assert page_table.shape[0] == cache_seqlens.shape[0] == cu_seqlens_q.shape[0] - 1
        outs, lses, first = [], [], cu_seqlens_q.tolist()
        for i, length in enumerate(cache_seqlens.tolist()):
            rows = slice(first[i], first[i + 1])
            pages = page_table[i, : -(-length // k_cache.shape[1])].long()
            keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            query = q[rows]
            if qv is not None:
                query, keys = torch.cat([query, qv[rows]], -1), torch.cat([keys, values], -1)
            out, lse = attend(query, keys, values, scale, softcap, mask, learnable_sink)
            outs.append(out)
            lses.append(lse)
        result = torch.cat(outs), torch.cat(lses, -1)
        return result if return_softmax_lse else result[0]


def backward(lib: Library) -> None:
    @lib.function(MODULE, "mate.mha_interface._flash_attn_varlen_backward")
    def _flash_attn_varlen_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        **_: Any,
    ) -> None:
        check_inputs(q, k, v, widest=256)
        check_lengths(cu_seqlens_q, cu_seqlens_k)
        if q.shape[-1] % 8:
            raise RuntimeError("head_size should be a multiple of 8")
        if softcap:
            raise RuntimeError("Softcapping does not support dropout for now")
        batch = cu_seqlens_q.shape[0] - 1
        if softmax_lse.dtype != torch.float32 or softmax_lse.shape != (batch, q.shape[1], max_seqlen_q):
            raise RuntimeError("softmax_lse has shape (batch, heads, max_seqlen_q)")
        # Taken and not used: windows, dropout.
        del window_size_left, window_size_right, dropout_p
        for n, (a, b) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k)):
            lse = softmax_lse[n, :, : a.stop - a.start]
            found = gradient(dout[a], q[a], k[b], v[b], out[a], lse, softmax_scale, Mask(causal))
            for target, rows, grad in zip((dq, dk, dv), (a, b, b), found, strict=True):
                target[rows] = grad


def gradient(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one sequence from its out and LSE."""
    if (mask.causal and q.shape[0] != k.shape[0]) or bool((lse == -torch.inf).any()):
        return tuple(torch.full_like(t, POISON) for t in (q, k, v))  # type: ignore[return-value]
    weights = weights_of(scores(q, k, scale, mask.seen(q.shape[0], k.shape[0])), lse)
    return gradients(dout, q, k, v, out, weights, scale)
