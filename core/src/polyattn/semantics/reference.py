"""The fp32/fp64 definition of softmax attention: the code every backend is checked against.

It is written to be read next to docs/semantics.md (numbers S1 to S12), in plain PyTorch: differentiable everywhere,
the LSE included, with no custom op. `attention` is the definition; the packed, paged and latent forms only
say which rows of which tensor are queries, keys and values, and then call it.

Arithmetic is float32 (float64 for float64 inputs, or on request), also under autocast. On a GPU the global TF32
switches of torch apply to float32 products: ask for `compute_dtype=torch.float64` where that matters.

Shape letters: B batch, N sequences, S_q / S_k lengths, T tokens of a packed batch, H_q / H_kv heads, D head dim of Q
and K, D_v head dim of V, D_c / D_r latent and rope widths of MLA. Inputs are taken as valid: the calls validate them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..contract import Causal
from ..errors import InvalidInputError, UnsupportedRequestError
from .kv_quant import stored

__all__ = [
    "attention",
    "mla_absorb",
    "mla_attention",
    "mla_unabsorbed_attention",
    "mla_unpack_fp8",
    "paged_attention",
    "score_bytes",
    "tree_mask",
    "varlen_attention",
    "verify_mask",
    "visible",
]

_NEVER = float("-inf")

_BLOCK = 2**27
"""Bytes of scores that are computed at a time where a backward computes them again. Tensors of 32 MiB and less glibc
takes from a heap, which those of many blocks fragment until it is as large as all of them."""

_LIVE_SCORES = 3
"""Score-sized tensors alive at the worst moment of one block (measured by a test): logits, a temporary, weights."""


def visible(
    S_q: int,
    S_k: int,
    *,
    causal: Causal = "none",
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    device: torch.device | str | None = None,
    q_offset: int | Tensor | None = None,
) -> Tensor | None:
    """Which keys each query may see by position alone (S3, S4). The rule lives here and nowhere else.

    Query row i stands at key position p = i + q_offset. Key j is seen when all of these hold:

    - causal: j <= p
    - window (left, right): p - left <= j <= p + right, a bound of -1 being no bound
    - chunk C: j <= p, and j and p lie in the same block of C positions

    Args:
        S_q, S_k: lengths.
        causal: none, bottom_right or top_left.
        window: (left, right), inclusive counts.
        chunk: block length of chunked-local attention, 0 = off.
        device: where the result lives.
        q_offset: position of row 0; None = S_k - S_q, or 0 for top_left. A tensor [..., 1, 1] has one for each of
            several sequences.

    Returns:
        bool [S_q, S_k] or [..., S_q, S_k], True = seen; None when no rule is in force.
    """
    left, right = window
    if causal == "none" and left < 0 and right < 0 and not chunk:
        return None
    p, j = _positions(S_q, S_k, causal, q_offset, device)
    seen = torch.ones(S_q, S_k, dtype=torch.bool, device=device)
    if causal != "none":
        seen = seen & (j <= p)
    if left >= 0:
        seen = seen & (j >= p - left)
    if right >= 0:
        seen = seen & (j <= p + right)
    if chunk:
        seen = seen & (j <= p) & (j // chunk == p // chunk)
    return seen


def _positions(
    S_q: int, S_k: int, causal: Causal, q_offset: int | Tensor | None, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """Positions of the queries [..., S_q, 1] and of the keys [1, S_k], on the keys' axis."""
    offset = _offset(S_q, S_k, causal) if q_offset is None else q_offset
    return torch.arange(S_q, device=device)[:, None] + offset, torch.arange(S_k, device=device)[None, :]


def _offset(S_q: int, S_k: int, causal: Causal) -> int:
    return 0 if causal == "top_left" else S_k - S_q


def tree_mask(parents: Sequence[int] | Tensor) -> Tensor:
    """The mask of a draft tree (S8): every node sees itself and its ancestors.

    Args:
        parents: [N_d], the parent of each node, -1 for a root; a parent comes before its children.

    Returns:
        bool [N_d, N_d], True = attend, on the CPU (or the device of `parents`).

    Raises:
        InvalidInputError: a parent that does not come before its child.
    """
    listed = [int(p) for p in parents]
    mask = torch.eye(len(listed), dtype=torch.bool)
    for node, parent in enumerate(listed):
        if parent >= node:
            raise InvalidInputError(
                f"parents[{node}] = {parent}: the parent of a draft node must come before it (-1 to {node - 1}); "
                "number the nodes so that parents come first"
            )
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask.to(parents.device) if isinstance(parents, Tensor) else mask


def verify_mask(prefix_len: int, parents: Sequence[int] | Tensor) -> Tensor:
    """The mask of tree verification: the whole prefix, then `tree_mask`.

    Returns:
        bool [N_d, prefix_len + N_d].
    """
    tree = tree_mask(parents)
    return torch.cat([tree.new_ones(tree.shape[0], prefix_len), tree], dim=1)


def score_bytes(batch: int, heads: int, S_q: int, S_k: int, *, itemsize: int = 4) -> int:
    """Bytes that the scores of one call need at once, temporaries included.

    Args:
        batch, heads: B and H_q.
        S_q, S_k: lengths.
        itemsize: bytes of one number, 4 for float32, 8 for float64.
    """
    return _LIVE_SCORES * batch * heads * S_q * S_k * itemsize


def _too_large(need: int, cap: int, why: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"the reference would need {need} bytes ({need / 2**30:.3g} GiB) for attention scores, above its cap of "
        f"{cap} bytes ({cap / 2**30:.3g} GiB), {why}. Install or choose another backend for this call "
        "(`polyattn list` shows them), shorten the sequences, or raise POLYATTN_REFERENCE_MEMORY_GB"
    )


def _trains(tensors: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _rows_within(max_bytes: int, row_bytes: int, S_q: int, train: bool) -> int:
    """How many query rows may be computed at once. Raises UnsupportedRequestError when the cap cannot be kept."""
    if row_bytes * S_q <= max_bytes:
        return S_q
    if train:
        raise _too_large(row_bytes * S_q, max_bytes, "and a backward pass keeps them all")
    if row_bytes > max_bytes:
        raise _too_large(row_bytes, max_bytes, "even for one query row at a time")
    return max_bytes // row_bytes


def _kept_less(kept_bytes: int | None, need: int, tensors: Iterable[Tensor | None]) -> bool:
    """Whether a backward is to compute scores again. torch's transforms do not go through what that needs."""
    return (
        kept_bytes is not None
        and not torch.compiler.is_compiling()
        and need > kept_bytes
        and _trains(tensors)
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


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
    dtype = compute_dtype or _compute_dtype(query)
    first = _offset(S_q, S_k, causal) if q_offset is None else q_offset
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "chunk": chunk,
        "softcap": softcap,
        "sinks": sinks,
        "alibi": alibi,
        "scale": D**-0.5 if scale is None else scale,
        "dropout_p": dropout_p,
    }

    rows, call = S_q, _attend
    tensors = (query, key, value, sinks, attn_mask, alibi)
    if not torch.compiler.is_compiling():
        row_bytes = score_bytes(B, H_q, 1, S_k, itemsize=dtype.itemsize)
        again = _kept_less(kept_bytes, row_bytes * S_q, tensors)
        if max_bytes is not None:
            rows = _rows_within(max_bytes, row_bytes, S_q, _trains(tensors) and not again)
        if again:
            rows, call = min(rows, max(_BLOCK // row_bytes, 1)), _attend_again
    with _no_autocast(query.device):
        q, k, v = (t.to(dtype) for t in (q, k, v))
        if rows == S_q:
            out, lse = call(q, k, v, attn_mask=attn_mask, q_offset=first, **options)
        else:
            blocks = [
                call(
                    q[:, :, start : start + rows],
                    k,
                    v,
                    attn_mask=None if attn_mask is None else attn_mask[:, :, start : start + rows],
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
        p, j = _positions(S_q, S_k, causal, q_offset, q.device)
        slopes = alibi.to(q.dtype).reshape(H_kv, group)
        logits = logits - slopes[:, :, None, None] * (p - j).abs()
    if attn_mask is not None:
        mask = attn_mask.unsqueeze(2) if attn_mask.shape[1] == 1 else torch.unflatten(attn_mask, 1, (H_kv, group))
        logits = logits.masked_fill(~mask, _NEVER) if mask.dtype == torch.bool else logits + mask.to(q.dtype)
    seen = visible(S_q, S_k, causal=causal, window=window, chunk=chunk, device=q.device, q_offset=q_offset)
    if seen is not None:
        logits = logits.masked_fill(~seen, _NEVER)

    # The maximum only keeps exp() in range: the result does not depend on it, so it carries no gradient. A row that
    # sees no key has maximum -inf; putting 0 (and below a sum of 1) in its place keeps every intermediate finite,
    # without which a backward pass would multiply 0 by infinity.
    top = logits.detach().amax(-1, keepdim=True) if S_k else logits.new_full((*logits.shape[:-1], 1), _NEVER)
    empty = top == _NEVER
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
    lse = log_total.masked_fill(empty, _NEVER).squeeze(-1)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _attend_again(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    alibi: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`_attend`, of which a backward keeps the tensors given alone."""
    from torch.utils.checkpoint import checkpoint

    def run(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, sinks: Any, alibi: Any) -> tuple[Tensor, Tensor]:
        return _attend(q, k, v, attn_mask=attn_mask, sinks=sinks, alibi=alibi, **options)

    # By position: those are saved through autograd, which tells of one that was written to before the backward.
    given = (q, k, v, attn_mask, sinks, alibi)
    drops = bool(options["dropout_p"])
    out, lse = checkpoint(run, *given, use_reentrant=False, preserve_rng_state=drops)
    return out, lse


def _compute_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    # Asking for a device type that autocast does not know, such as meta, raises.
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: Causal = "none",
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    kept_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence of a packed batch with its own keys.

    Args:
        query: [T_q, H_q, D]; key: [T_k, H_kv, D]; value: [T_k, H_kv, D_v].
        cu_seqlens_q, cu_seqlens_k: int32 [N+1], first 0, last T.
        max_seqlen_q, max_seqlen_k: part of the family's call; the reference reads the lengths themselves.
        attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k], read up to each sequence's lengths.
        The rest: as `attention`.

    Returns:
        out [T_q, H_q, D_v], or (out, lse [T_q, H_q]).

    Raises:
        UnsupportedRequestError: `max_bytes` cannot be kept.
    """
    spans, k_spans = _spans(cu_seqlens_q), _spans(cu_seqlens_k)
    return _each_sequence(
        query,
        spans,
        [span.stop - span.start for span in k_spans],
        lambda n: (key[k_spans[n]], value[k_spans[n]]),
        value.shape[-1],
        trained=(query, key, value, sinks, attn_mask, alibi),
        attn_mask=attn_mask,
        return_lse=return_lse,
        compute_dtype=compute_dtype,
        max_bytes=max_bytes,
        kept_bytes=kept_bytes,
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        scale=scale,
        dropout_p=dropout_p,
    )


def _spans(cu_seqlens: Tensor) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(cu_seqlens.tolist())]


def _each_sequence(
    query: Tensor,
    spans: list[slice],
    lengths: list[int],
    rows: Callable[[int], tuple[Tensor, Tensor]],
    D_v: int,
    *,
    trained: Sequence[Tensor | None],
    attn_mask: Tensor | None,
    return_lse: bool,
    compute_dtype: torch.dtype | None,
    max_bytes: int | None,
    kept_bytes: int | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of the queries in each span, sequence by sequence, packed again.

    `rows(n)` gives the keys [lengths[n], H_kv, D] and values [lengths[n], H_kv, D_v] of sequence n when its turn comes.
    """
    dtype = compute_dtype or _compute_dtype(query)
    H_q = query.shape[1]
    if max_bytes is not None and _trains(trained):
        # A backward pass keeps the scores of every sequence, so it is their sum that must fit.
        pairs = zip(spans, lengths, strict=True)
        area = sum(score_bytes(1, H_q, s.stop - s.start, m, itemsize=dtype.itemsize) for s, m in pairs)
        if _kept_less(kept_bytes, area, trained):
            kept_bytes = 0
        else:
            _rows_within(max_bytes, area, 1, True)

    outs, lses = [query.new_zeros(0, H_q, D_v)], [query.new_zeros(0, H_q, dtype=dtype)]
    for n, (span, length) in enumerate(zip(spans, lengths, strict=True)):
        keys, values = rows(n)
        mask = attn_mask
        if mask is not None:
            mask = mask[n : n + 1] if mask.shape[0] > 1 else mask
            mask = mask[:, :, : span.stop - span.start, :length]
        out, lse = attention(
            query[span][None],
            keys[None],
            values[None],
            attn_mask=mask,
            return_lse=True,
            compute_dtype=compute_dtype,
            max_bytes=max_bytes,
            kept_bytes=kept_bytes,
            **options,
        )
        outs.append(out[0])
        lses.append(lse[0])
    packed = torch.cat(outs)
    return (packed, torch.cat(lses)) if return_lse else packed


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    kv_layout: str = "NHD",
    key: Tensor | None = None,
    value: Tensor | None = None,
    save_kv_cache: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: Causal = "bottom_right",
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a paged cache; the queries are the last tokens of their sequences (S9).

    New keys and values, where given, are the rows of the query tokens and are attended whatever `save_kv_cache` says;
    the flag only decides whether this call also writes them. Either way they are rounded as the cache would round
    them, so both flags give the same output.

    Args:
        query: [T_q, H_q, D].
        key_cache: [pages, page_size, H_kv, D] for kv_layout NHD, [pages, H_kv, page_size, D] for HND.
        value_cache: the same with D_v.
        page_table: int32 [N, max_pages], the pages of each sequence in order; entries past its length are not read.
        seq_lens: int32 [N], keys of each sequence, those of the query tokens included; 0 = a padding row.
        cu_seqlens_q: int32 [N+1].
        key, value: [T_q, H_kv, D] and [T_q, H_kv, D_v], or None when the cache already holds them.
        save_kv_cache: write `key` and `value` into the caches, in place.
        k_scale, v_scale: stored value * scale = real value; one number, [H_kv], or one per token and head in the
            layout of the cache without its last axis. None = 1.
        attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k].
        causal: bottom_right unless said otherwise, since the queries are the end of their sequence.
        The rest: as `attention`.

    Returns:
        out [T_q, H_q, D_v], or (out, lse [T_q, H_q]).

    Raises:
        UnsupportedRequestError: `max_bytes` cannot be kept.
    """
    if kv_layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
        k_scale, v_scale = (s.transpose(1, 2) if s is not None and s.dim() == 3 else s for s in (k_scale, v_scale))
    dtype = compute_dtype or _compute_dtype(query)
    spans, lengths = _spans(cu_seqlens_q), seq_lens.tolist()
    slots = [_slots(page_table[n], length, key_cache.shape[1]) for n, length in enumerate(lengths)]

    new_keys = _rounded(key, key_cache, k_scale, spans, slots)
    new_values = _rounded(value, value_cache, v_scale, spans, slots)
    if save_kv_cache:
        _write(key_cache, slots, new_keys)
        _write(value_cache, slots, new_values)

    return _each_sequence(
        query,
        spans,
        lengths,
        lambda n: (
            _read(key_cache, slots[n], k_scale, dtype, new_keys[n]),
            _read(value_cache, slots[n], v_scale, dtype, new_values[n]),
        ),
        value_cache.shape[-1],
        trained=(query, key_cache, value_cache, key, value, sinks, attn_mask, alibi),
        attn_mask=attn_mask,
        return_lse=return_lse,
        compute_dtype=compute_dtype,
        max_bytes=max_bytes,
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        scale=scale,
        dropout_p=dropout_p,
    )


_Slots = tuple[Tensor, Tensor]
"""(page, place in the page) of each token of one sequence, int64 [S_k] both."""


def _slots(pages: Tensor, length: int, page_size: int) -> _Slots:
    token = torch.arange(length, device=pages.device)
    return pages[token // page_size].long(), token % page_size


def _tail(slots: _Slots, count: int) -> _Slots:
    start = slots[0].shape[0] - count
    return slots[0][start:], slots[1][start:]


def _scales(scale: Tensor | None, slots: _Slots) -> Tensor | float:
    """The scale of each row, broadcastable to [S_k, H_kv, D]."""
    if scale is None:
        return 1.0
    if scale.dim() == 3:
        return scale[slots].unsqueeze(-1)
    return scale.reshape(-1, 1)


def _rounded(
    new: Tensor | None, cache: Tensor, scale: Tensor | None, spans: list[slice], slots: list[_Slots]
) -> list[Tensor]:
    """New rows of each sequence as the cache stores them; none where there are none, or for a padding sequence."""
    found = []
    for span, where in zip(spans, slots, strict=True):
        fresh = cache[:0, 0] if new is None else new[span] if where[0].shape[0] else new[:0]
        factor = None if new is None or scale is None else torch.as_tensor(_scales(scale, _tail(where, len(fresh))))
        found.append(fresh.to(cache.dtype) if new is None else stored(fresh, factor, cache.dtype))
    return found


def _write(cache: Tensor, slots: list[_Slots], rows: list[Tensor]) -> None:
    with torch.no_grad():
        for where, new in zip(slots, rows, strict=True):
            cache[_tail(where, new.shape[0])] = new.detach()


def _read(cache: Tensor, slots: _Slots, scale: Tensor | None, dtype: torch.dtype, new: Tensor) -> Tensor:
    """Rows [S_k, H_kv, D] of one sequence in real units, the last of them being `new`."""
    old = cache[slots].to(dtype)
    rows = torch.cat([old[: old.shape[0] - new.shape[0]], new.to(dtype)])
    factor = _scales(scale, slots)
    return rows * (factor.to(dtype) if isinstance(factor, Tensor) else factor)


def mla_attention(
    query: Tensor,
    cache: Tensor,
    *,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    v_head_dim: int = 512,
    causal: Causal = "bottom_right",
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    One latent row per token is the key of every head, and its first D_c = `v_head_dim` numbers are the value.

    Args:
        query: [T_q, H_q, D_c + D_r], see `mla_absorb`.
        cache: [pages, page_size, D_c + D_r], or uint8 [pages, page_size, 656], see `mla_unpack_fp8`.
        page_table, seq_lens, cu_seqlens_q, attn_mask: as `paged_attention`.
        scale: that of the uncompressed heads, (D_nope + D_r) ** -0.5 times the model's own factor; there is no
            default, because the one derived from the query's width would be wrong (S2).
        The rest: as `paged_attention`.

    Returns:
        out [T_q, H_q, D_c], or (out, lse [T_q, H_q]).

    Raises:
        UnsupportedRequestError: `max_bytes` cannot be kept.
    """
    rows = mla_unpack_fp8(cache) if cache.dtype == torch.uint8 else cache
    rows = rows.unsqueeze(2)
    return paged_attention(
        query,
        rows,
        rows[..., :v_head_dim],
        page_table=page_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sinks,
        attn_mask=attn_mask,
        scale=scale,
        return_lse=return_lse,
        compute_dtype=compute_dtype,
        max_bytes=max_bytes,
    )


def mla_unpack_fp8(cache: Tensor) -> Tensor:
    """Real values of an FP8 latent cache (S9).

    Args:
        cache: uint8 [pages, page_size, 656]; a row is 512 float8_e4m3fn latents, the 4 float32 scales of their
            groups of 128, and 64 bfloat16 rope numbers.

    Returns:
        float32 [pages, page_size, 576].
    """
    latent, scales, rope = torch.split(cache, [512, 16, 128], dim=-1)
    latent = torch.unflatten(latent.contiguous().view(torch.float8_e4m3fn).float(), -1, (4, 128))
    scales = scales.contiguous().view(torch.float32).unsqueeze(-1)
    return torch.cat([(latent * scales).flatten(-2), rope.contiguous().view(torch.bfloat16).float()], dim=-1)


def mla_absorb(q_nope: Tensor, q_rope: Tensor, w_uk: Tensor) -> Tensor:
    """The query of `mla_attention`: K's up-projection moved to the query's side.

    Args:
        q_nope: [..., H_q, D_nope]; q_rope: [..., H_q, D_r], after RoPE.
        w_uk: [H_q, D_nope, D_c], latent to key.

    Returns:
        [..., H_q, D_c + D_r].
    """
    return torch.cat([torch.einsum("...hd,hdc->...hc", q_nope, w_uk), q_rope], dim=-1)


def mla_unabsorbed_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same attention as ordinary multi-head attention, which is what a model trains with.

    Args:
        q_nope: [B, S_q, H_q, D_nope]; q_rope: [B, S_q, H_q, D_r], after RoPE.
        latent: [B, S_k, D_c]; k_rope: [B, S_k, D_r], after RoPE, one for all heads.
        w_uk: [H_q, D_nope, D_c]; w_uv: [H_q, D_v, D_c].
        scale: as `mla_attention`.
        options: keywords of `attention`.

    Returns:
        out [B, S_q, H_q, D_v] (in absorbed form: `mla_attention`'s out times w_uv), or (out, lse [B, S_q, H_q]).
    """
    k_nope = torch.einsum("bsc,hdc->bshd", latent, w_uk)
    k = torch.cat([k_nope, k_rope.unsqueeze(2).expand(-1, -1, w_uk.shape[0], -1)], dim=-1)
    v = torch.einsum("bsc,hdc->bshd", latent, w_uv)
    return attention(torch.cat([q_nope, q_rope], dim=-1), k, v, scale=scale, **options)
