"""cuDNN's attention: the torch ops of nvidia-cudnn-frontend 1.32 (cudnn/sdpa/fwd/torch_op.py) and PyTorch's own.

The packed backward goes wrong where the query has gaps, on an H200 as far as an illegal instruction. The dense one
gives NaN for queries of a low LSE at some lengths (pytorch#196678); the FlashAttention 2 that torch brings, emulated
too, does not. The front end runs its graphs on the current device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.testing.emulators import Library, signature_of_schema
from polyattn.testing.emulators.arithmetic import gradients, lse_of, scores, weighted, weights_of

from . import SIGNATURES
from .gpus import launched

__all__ = ["frontend", "torch_itself"]

MODULE = "cudnn.sdpa.fwd.torch_op"
ATEN = "_scaled_dot_product_cudnn_attention"


def frontend(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The front end, installed."""
    lib = Library("nvidia-cudnn-frontend", "1.32.0", MODULE, signatures=SIGNATURES)

    @lib.function(MODULE, "cudnn.sdpa")
    def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float | None, return_lse: bool, **given: Any) -> Any:
        assert given.pop("sinks") is None
        assert given.pop("seq_len_q") is None
        assert given.pop("seq_len_kv") is None
        launched(query)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        starts, band = _taken(query, given)
        outs, lses = [], []
        for q, k, v in _parts(starts, query, key, value):
            out, lse = _attend(q, k, v, scale, **band)
            outs.append(out)
            lses.append(lse)
        out, lse = _joined(starts, outs), _joined(starts, [x.unsqueeze(-1) for x in lses])
        return (out, lse) if return_lse else out

    @lib.function(MODULE, "torch.ops.cudnn.sdpa_bwd")
    def sdpa_bwd(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        attn_scale: float,
        is_deterministic: bool,
        **given: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert given.pop("sinks") is None
        assert lse.dtype == torch.float32
        launched(q)
        starts, band = _taken(q, given)
        lengths = (q.shape[2], k.shape[2]) if starts is None else (given["max_seqlen_q"], given["max_seqlen_kv"])
        _check_backward(*lengths)
        if starts is None:
            found = _gradient(grad_out, q, k, v, o, lse.reshape(o.shape[:3]), attn_scale, **band)
            return _overflown(found, lse, *lengths)
        if not q.is_contiguous():
            raise RuntimeError("CUDA error: an illegal instruction was encountered")
        count, longest = len(starts[0]) - 1, given["max_seqlen_q"]
        assert lse.shape[:3] == (count, q.shape[1], longest), "lse arrives padded"
        parts = zip(_parts(starts, q, k, v), _parts((starts[0],) * 2, o, grad_out, grad_out), strict=True)
        parts_found = []
        for n, ((query, key, value), (out, dout, _)) in enumerate(parts):
            rows = lse[n : n + 1, :, : query.shape[2]]
            parts_found.append(_gradient(dout, query, key, value, out, rows, attn_scale, **band))
        dq, dk, dv = (_joined(starts, list(grads)) for grads in zip(*parts_found, strict=True))
        return dq, dk, dv

    _flash(lib, monkeypatch)
    monkeypatch.setattr(torch.ops, "cudnn", SimpleNamespace(sdpa_bwd=sdpa_bwd), raising=False)
    return lib.install(monkeypatch)


def torch_itself(monkeypatch: pytest.MonkeyPatch) -> Library:
    """PyTorch's ops, held to their live schemas. Like them it keeps the plans of backwards by query, key and value
    (aten/src/ATen/native/cudnn/MHA.cpp, MHAParams): `out` and its gradient are read by the first call's strides."""
    lib = Library("torch", torch.__version__)
    plans: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: None,
        compute_log_sumexp: bool,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        scale: float | None,
    ) -> tuple[Any, ...]:
        assert attn_bias is None
        assert not dropout_p
        assert not return_debug_mask
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        _check(query)
        out, lse = _attend(query, key, value, scale, is_causal=is_causal)
        stats = lse.unsqueeze(-1) if compute_log_sumexp else torch.empty(0)
        return (out, stats, None, None, query.shape[2], key.shape[2], torch.zeros(()), torch.zeros(()), None)

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert all(unused[name] is None for name in ("attn_bias", "cum_seq_q", "cum_seq_k"))
        assert (max_q, max_k, dropout_p) == (query.shape[2], key.shape[2], 0.0)
        assert logsumexp.shape == (*out.shape[:3], 1)
        assert logsumexp.is_contiguous()
        _check_backward(max_q, max_k)
        key_of_plan = (*((t.shape, t.stride()) for t in (query, key, value)), is_causal)
        strides = plans.setdefault(key_of_plan, (out.stride(), grad_out.stride()))
        out, grad_out = (t.as_strided(t.shape, at) for t, at in zip((out, grad_out), strides, strict=True))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        found = _gradient(grad_out, query, key, value, out, logsumexp.squeeze(-1), scale, is_causal=is_causal)
        return _overflown(found, logsumexp, max_q, max_k)

    _flash(lib, monkeypatch)
    for name, body in ((ATEN, forward), (f"{ATEN}_backward", backward)):
        live = signature_of_schema(getattr(torch.ops.aten, name).default._schema)
        monkeypatch.setattr(torch.ops.aten, name, lib.held(name, live, body))
    return lib.install(monkeypatch)


Starts = tuple[list[int], list[int]] | None
Gradients = tuple[Tensor, Tensor, Tensor]


def _flash(lib: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of the FlashAttention 2 that torch brings: [B, S, H, D], bands from the lower right corner."""

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        window_size_left: int | None,
        window_size_right: int | None,
        **unused: Any,
    ) -> Gradients:
        assert unused["cum_seq_q"] is unused["cum_seq_k"] is None
        assert (max_q, max_k, dropout_p) == (query.shape[1], key.shape[1], 0.0)
        assert logsumexp.is_contiguous()
        assert logsumexp.shape == (query.shape[0], query.shape[2], max_q)
        left = -1 if window_size_left is None else window_size_left + 1
        right = -1 if window_size_right is None else window_size_right
        band = {"is_causal": is_causal, "window_left": left, "window_right": right, "causal_bottom_right": True}
        sides = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
        found = _gradient(*sides, logsumexp, scale or query.shape[-1] ** -0.5, **band)
        return tuple(grad.transpose(1, 2) for grad in found)  # type: ignore[return-value]

    name = "_flash_attention_backward"
    live = signature_of_schema(getattr(torch.ops.aten, name).default._schema)
    monkeypatch.setattr(torch.ops.aten, name, lib.held(name, live, backward))


def _overflown(found: Gradients, lse: Tensor, s_q: int, s_k: int) -> Gradients:
    """The gradients with the NaN that padded keys leave in them: they score 0, and exp(0 - LSE) is infinite."""
    dq, dk, dv = found
    if float(lse.min()) > -88.7:
        return found
    dq = torch.full_like(dq, torch.nan) if s_k % 128 == 64 else dq
    if s_q == 1 and s_k % 64 == 0:
        dk, dv = (torch.full_like(t, torch.nan) for t in (dk, dv))
    return dq, dk, dv


def _check(query: Tensor) -> None:
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"unsupported dtype {query.dtype}")
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        raise RuntimeError(f"no engine for head dim {query.shape[-1]}")
    rows = [stride for size, stride in zip(query.shape[:-1], query.stride()[:-1], strict=True) if size > 1]
    if query.data_ptr() % 16 or any(stride * query.itemsize % 16 for stride in rows):
        raise RuntimeError("misaligned address")


def _check_backward(s_q: int, s_kv: int) -> None:
    if s_q == s_kv == 1:
        raise RuntimeError("cuDNN Frontend error: s_q = s_kv = 1 is not supported.")


def _taken(query: Tensor, given: dict[str, Any]) -> tuple[Starts, dict[str, Any]]:
    """(lengths of a packed call, the band), after the checks of the real op."""
    _check(query)
    band = {name: given[name] for name in ("is_causal", "causal_bottom_right", "window_left", "window_right")}
    active = band["is_causal"] or band["window_left"] >= 0 or band["window_right"] >= 0
    if band["causal_bottom_right"] and not active:
        raise ValueError("causal_bottom_right only re-anchors an active diagonal band")
    if band["is_causal"] and band["window_right"] > 0:
        raise ValueError("is_causal masks every future column but window_right admits some; pass one or the other")
    if band["window_left"] == 0:
        raise RuntimeError("sliding-window length must be >= 1; got 0")
    if given["cu_seqlens_q"] is None:
        return None, band
    if given["max_seqlen_q"] <= 0 or given["max_seqlen_kv"] <= 0:
        raise ValueError("varlen path needs cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv")
    return (given["cu_seqlens_q"].tolist(), given["cu_seqlens_kv"].tolist()), band


def _parts(starts: Starts, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    if starts is None:
        return [(q, k, v)]
    found = []
    for n in range(len(starts[0]) - 1):
        rows, keys = (slice(s[n], s[n + 1]) for s in starts)
        of = ((q, rows), (k, keys), (v, keys))
        found.append(tuple(t[part].transpose(0, 1).unsqueeze(0) for t, part in of))
    return found  # type: ignore[return-value]


def _joined(starts: Starts, parts: list[Tensor]) -> Tensor:
    return parts[0] if starts is None else torch.cat([part[0].transpose(0, 1) for part in parts])


def _seen(
    rows: int,
    keys: int,
    is_causal: bool = False,
    causal_bottom_right: bool = False,
    window_left: int = -1,
    window_right: int = -1,
) -> Tensor:
    """The left bound counts the query itself, the right one does not."""
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows if causal_bottom_right else 0)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if is_causal or window_right >= 0:
        seen &= distance <= max(window_right, 0)
    return seen & (distance > -window_left) if window_left > 0 else seen


def _weights(q: Tensor, k: Tensor, scale: float, lse: Tensor | None, band: dict[str, Any]) -> tuple[Tensor, Tensor]:
    seen = _seen(q.shape[2], k.shape[2], **band)
    if not bool(seen.any(-1).all()):
        raise RuntimeError("a row without keys: not written down what becomes of it")
    logits = scores(q.transpose(1, 2), k.transpose(1, 2), scale, seen)
    lse = lse_of(logits) if lse is None else lse
    return weights_of(logits, lse), lse


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, **band: Any) -> tuple[Tensor, Tensor]:
    weights, lse = _weights(q, k, scale, None, band)
    out = weighted(weights.to(q.dtype).float(), v.transpose(1, 2)).transpose(1, 2)
    return out.to(q.dtype), lse


def _gradient(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, **band: Any
) -> tuple[Tensor, Tensor, Tensor]:
    weights, _ = _weights(q, k, scale, lse, band)
    sides = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dq, dk, dv = gradients(*sides, weights, scale, rounded=q.dtype)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
