"""The definition of the gated delta rules: token by token, in float32, or float64 where values are float64.

For each value head, with the state S [D, D_v] and the log decay g:

    S <- exp(g_t) * S                 # a number (GDN), or one for each row of S (KDA)
    u  = beta_t * (v_t - S^T k_t)
    S <- S + k_t u^T
    o_t = scale * S^T q_t

Sources: Gated DeltaNet, arXiv 2412.06464, equation 10; Kimi Delta Attention, arXiv 2510.26692.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

EPSILON = 1e-6
"""Of the norm, under the root: as kernels have it that normalise queries and keys."""


def unit_rows(tensor: Tensor) -> Tensor:
    """Rows of length one: x / sqrt(sum(x^2) + 1e-6), computed in float32 or wider, in the dtype of the input."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)).to(tensor.dtype)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gate: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    state_layout: str = "KV",
    every_state: bool = False,
    parents: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention by its recurrence. Differentiable in every tensor.

    Args:
        query, key: [B, S, H, D]; value: [B, S, H_v, D_v]. Value head h reads query and key head h // (H_v / H).
        gate: log decay, [B, S, H_v], or [B, S, H_v, D] with a number for each row of the state. beta: [B, S, H_v].
        state: [N, H_v, D, D_v], or [N, H_v, D_v, D] with state_layout="VK"; not written. None = zeros.
        cu_seqlens: int32 [N+1], with B = 1: sequences behind each other. Without, N = B.
        scale: None = D ** -0.5. out: [B, S, H_v, D_v].
        every_state: return the states after all tokens. parents: integers [B, S], the token that each goes on from, an
            earlier one, or -1, the state given. None: the one before.

    Returns:
        (out in the dtype of value, the state after the last token, in the dtype of the arithmetic). With every_state
        that after each token, [B, S, H_v, D, D_v].
    """
    given = (query, key, value, gate, beta)
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    group = value.shape[2] // query.shape[2]
    q, k, v, g, b = (t.to(dtype) for t in given)
    q, k = (t.repeat_interleave(group, 2) for t in (q, k))
    decay = (g if g.ndim == 4 else g[..., None]).exp()
    sequences = _sequences(query, cu_seqlens)
    first = _first(state, len(sequences), v, q.shape[-1], dtype, state_layout)
    outs, states = [], []
    for number, (rows, tokens) in enumerate(sequences):
        at = (rows, tokens)
        before = None if parents is None else parents[rows].tolist()
        found, after = _recur(q[at] * factor, k[at], v[at], decay[at], b[at], first[number], before)
        outs.append(found)
        states.append(torch.stack(after[1:]) if every_state else after[-1])
    if not sequences:
        whole, last_states = v * 1.0, first[:, None].expand(-1, v.shape[1], -1, -1, -1) if every_state else first
    else:
        whole = torch.stack(outs) if cu_seqlens is None else torch.cat(outs)[None]
        last_states = torch.stack(states)
    result = whole.to(value.dtype)
    result = result if out is None else out.copy_(result)
    return result, last_states if state_layout == "KV" else last_states.mT.contiguous()


def _sequences(query: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, slice]]:
    """(row of the batch, its tokens) of each sequence."""
    if cu_seqlens is None:
        return [(row, slice(None)) for row in range(query.shape[0])]
    starts = cu_seqlens.tolist()
    return [(0, slice(start, end)) for start, end in pairwise(starts)]


def _first(state: Tensor | None, count: int, value: Tensor, D: int, dtype: torch.dtype, state_layout: str) -> Tensor:
    """[N, H_v, D, D_v]"""
    if state is None:
        return torch.zeros(count, value.shape[2], D, value.shape[3], dtype=dtype, device=value.device)
    return (state if state_layout == "KV" else state.mT).to(dtype)


def _recur(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    parents: list[int] | None,
) -> tuple[Tensor, list[Tensor]]:
    """Compute one sequence: [S, H_v, D | D_v | 1] and the state [H_v, D, D_v] -> (out [S, H_v, D_v], the state given
    and those after each token)."""
    outs, states = [], [state]
    for t, (q, k, v, d, b) in enumerate(zip(query, key, value, decay, beta, strict=True)):
        state = states[-1 if parents is None else parents[t] + 1] * d[..., None]
        u = b[:, None] * (v - torch.einsum("hdv,hd->hv", state, k))
        state = state + k[..., None] * u[:, None]
        states.append(state)
        outs.append(torch.einsum("hdv,hd->hv", state, q))
    # Of no tokens the output is empty, and still one of the values, so that gradients go through.
    return torch.stack(outs) if outs else value * 1.0, states
