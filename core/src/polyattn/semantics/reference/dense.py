"""The definition of softmax attention over a dense batch (S1 to S7, S11)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ...contract import Causal
from .memory import keeps_less, rows_within, score_bytes, trains
from .visibility import alibi_bias, first_position, positions, same_segment, visible

NEVER = float("-inf")

_BLOCK = 2**27
"""Bytes of scores that are computed at a time where a backward computes them again. Tensors of 32 MiB and less glibc
takes from a heap, which those of many blocks fragment until it is as large as all of them."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: Causal = "none",
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi: Tensor | None = None,
    q_segments: Tensor | None = None,
    k_segments: Tensor | None = None,
    scale: float | None = None,
    layout: str = "BSHD",
    dropout_p: float = 0.0,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
    q_offset: int | None = None,
    max_bytes: int | None = None,
    kept_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over a dense batch.

    Args:
        query: [B, S_q, H_q, D] for layout BSHD, [B, H_q, S_q, D] for BHSD.
        key: [B, S_k, H_kv, D] or [B, H_kv, S_k, D]; H_q is a multiple of H_kv.
        value: [B, S_k, H_kv, D_v] or [B, H_kv, S_k, D_v].
        causal, window, chunk: who sees what, see `visible`.
        softcap: cap on the scaled logits, 0 = off (S5).
        sinks: [H_q] natural-log logits that count in the denominator only (S5).
        attn_mask: [B|1, H_q|1, S_q, S_k], bool (True = attend) or additive (S8).
        alibi: [H_q] slopes; adds -slope * |p - j|, p and j as in `visible` (S8).
        q_segments, k_segments: [B, S_q] and [B, S_k] whole numbers; a query sees keys of its own number alone (S8).
        scale: factor on the logits, None = D ** -0.5 (S2).
        layout: BSHD or BHSD (S1).
        dropout_p: probability of dropping an attention weight (S11). The LSE does not see it.
        return_lse: also return the LSE.
        compute_dtype: float32 or float64; None = float64 for a float64 query, else float32.
        q_offset: position of query row 0 on the keys' axis; None = as aligned by `causal`.
        max_bytes: cap on the memory of the scores, None = none. Without gradients the query rows are then computed
            in blocks. Not looked at while torch.compile traces: sizes may be symbols there.
        kept_bytes: most bytes of scores that a backward may keep, None = any. Of more it keeps none: the query rows are
            computed in blocks, and once more by the backward. Not looked at under torch.compile, a transform of
            torch.func and forward-mode AD.

    Returns:
        out [B, S_q, H_q, D_v] or [B, H_q, S_q, D_v] in the dtype of `query`, or (out, lse), lse being [B, S_q, H_q] or
        [B, H_q, S_q] in the compute dtype: natural log, without the sink (S6). A row that sees no key gives
        out = 0, lse = -inf and exact zeros in every gradient (S7).

    Raises:
        UnsupportedRequestError: `max_bytes` cannot be kept.
    """
    heads_first = layout == "BHSD"
    q, k, v = (query, key, value) if heads_first else (t.transpose(1, 2) for t in (query, key, value))
    B, H_q, S_q, D = q.shape
    S_k = k.shape[2]
    dtype = compute_dtype or compute_dtype_of(query)
    first = first_position(S_q, S_k, causal) if q_offset is None else q_offset
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "chunk": chunk,
        "softcap": softcap,
        "sinks": sinks,
        "alibi": alibi,
        "k_segments": k_segments,
        "scale": D**-0.5 if scale is None else scale,
        "dropout_p": dropout_p,
    }

    rows, call = S_q, _attend
    tensors = (query, key, value, sinks, attn_mask, alibi)
    if not torch.compiler.is_compiling():
        row_bytes = score_bytes(B, H_q, 1, S_k, itemsize=dtype.itemsize)
        again = keeps_less(kept_bytes, row_bytes * S_q, tensors)
        if max_bytes is not None:
            rows = rows_within(max_bytes, row_bytes, S_q, trains(tensors) and not again)
        if again:
            rows, call = min(rows, max(_BLOCK // row_bytes, 1)), _attend_again
    with _no_autocast(query.device):
        q, k, v = (t.to(dtype) for t in (q, k, v))
        if rows == S_q:
            out, lse = call(q, k, v, attn_mask=attn_mask, q_segments=q_segments, q_offset=first, **options)
        else:
            blocks = [
                call(
                    q[:, :, start : start + rows],
                    k,
                    v,
                    attn_mask=None if attn_mask is None else attn_mask[:, :, start : start + rows],
                    q_segments=None if q_segments is None else q_segments[:, start : start + rows],
                    q_offset=first + start,
                    **options,
                )
                for start in range(0, S_q, rows)
            ]
            out, lse = (torch.cat(parts, dim=2) for parts in zip(*blocks, strict=True))
    out = out.to(query.dtype)
    if not heads_first:
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal,
    window: tuple[int, int],
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
    attn_mask: Tensor | None,
    alibi: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    scale: float,
    dropout_p: float,
    q_offset: int,
) -> tuple[Tensor, Tensor]:
    """(out [B, H_q, S_q, D_v], lse [B, H_q, S_q]) of heads-first tensors already in the compute dtype."""
    S_q, S_k, H_kv = q.shape[2], k.shape[2], k.shape[1]
    group = q.shape[1] // H_kv
    # G query heads share a key head: an axis of their own, so that keys and values are never repeated.
    q = torch.unflatten(q, 1, (H_kv, group))

    logits = torch.einsum("bhgqd,bhkd->bhgqk", q, k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if alibi is not None:
        p, j = positions(S_q, S_k, causal, q_offset, q.device)
        logits = logits + torch.unflatten(alibi_bias(alibi.to(q.dtype), p, j), 0, (H_kv, group))
    if attn_mask is not None:
        mask = attn_mask.unsqueeze(2) if attn_mask.shape[1] == 1 else torch.unflatten(attn_mask, 1, (H_kv, group))
        logits = logits.masked_fill(~mask, NEVER) if mask.dtype == torch.bool else logits + mask.to(q.dtype)
    seen = visible(S_q, S_k, causal=causal, window=window, chunk=chunk, device=q.device, q_offset=q_offset)
    if seen is not None:
        logits = logits.masked_fill(~seen, NEVER)
    if q_segments is not None and k_segments is not None:
        logits = logits.masked_fill(~same_segment(q_segments, k_segments)[:, None, None], NEVER)

    # The maximum only keeps exp() in range: the result does not depend on it, so it carries no gradient. A row that
    # sees no key has maximum -inf; putting 0 (and below a sum of 1) in its place keeps every intermediate finite,
    # without which a backward pass would multiply 0 by infinity.
    top = logits.detach().amax(-1, keepdim=True) if S_k else logits.new_full((*logits.shape[:-1], 1), NEVER)
    empty = top == NEVER
    top = top.masked_fill(empty, 0.0)
    weights = torch.exp(logits - top)
    del logits  # dropout would make a fourth tensor of this size
    total = weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
    log_total = top + torch.log(total)

    if dropout_p:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    out = torch.einsum("bhgqk,bhkd->bhgqd", weights, v) / total
    if sinks is not None:
        # 1 / (total + e^(sink - top)) = sigmoid(lse - sink) / total, which no sink can overflow. By its logarithm: the
        # gradient of sigmoid, s (1 - s), loses its digits where a sink is far below.
        z = sinks.to(q.dtype).reshape(H_kv, group)
        out = out * torch.exp(torch.nn.functional.logsigmoid(log_total - z[:, :, None, None]))
    lse = log_total.masked_fill(empty, NEVER).squeeze(-1)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _attend_again(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    alibi: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`_attend`, of which a backward keeps the tensors given alone."""
    from torch.utils.checkpoint import checkpoint

    def run(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        return _attend(q, k, v, **dict(zip(names, given, strict=True)), **options)

    # By position: those are saved through autograd, which tells of one that was written to before the backward.
    names = ("attn_mask", "sinks", "alibi", "q_segments", "k_segments")
    given = (q, k, v, attn_mask, sinks, alibi, q_segments, k_segments)
    drops = bool(options["dropout_p"])
    out, lse = checkpoint(run, *given, use_reentrant=False, preserve_rng_state=drops)
    return out, lse


def compute_dtype_of(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    # Asking for a device type that autocast does not know, such as meta, raises.
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
