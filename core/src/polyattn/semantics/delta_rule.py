"""The chunked form of the gated delta rules: products of matrices in place of a step for each token.

Within a chunk of C tokens, with G the running sum of the log decays and `<i, j>` the product of two rows that decays
from j to i, `sum_d x_id y_jd exp(G_id - G_jd)`:

    A_ij = beta_i <k_i, k_j>  for j < i,   T = (I + A)^-1
    V'   = T (beta v) - T (beta k e^G) S
    o_i  = scale * ((q_i e^G_i) S + sum over j <= i of <q_i, k_j> V'_j)
    S   <- e^G_C S + (k e^(G_C - G))^T V'

No exponent is above zero, so that nothing overflows however fast a channel decays. A decay that is 0 has a logarithm
that sums cannot be made of, and takes the least one that is 0 in its place: `held_back`. It is the recurrence of
`reference.gated_delta_rule`, in another order of operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["by_length", "chunked_delta_rule"]

LEAST = {torch.float32: -104.0, torch.float64: -746.0}
"""Log decays whose exponential is 0 in a dtype."""
CHUNK = {3: 64, 4: 16}
"""Tokens of a chunk by the rank of the gates: with a decay for each channel <i, j> is no product of matrices."""


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gate: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    chunk: int = 0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention in chunks. Differentiable in every tensor; shapes as `reference.gated_delta_rule` has them.

    Args:
        state: [N, H_v, D, D_v], None = zeros. cu_seqlens: read on the host. chunk: C, 0 = 64, or 16 with a decay for
            each channel.

    Returns:
        (out in the dtype of value, the state after the last token [N, H_v, D, D_v], float32, or float64 where values
        are).
    """
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    heads, (D, D_v) = value.shape[2], (query.shape[-1], value.shape[-1])
    count = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state is None:
        state = torch.zeros(count, heads, D, D_v, dtype=dtype, device=value.device)
    size = chunk or CHUNK[gate.ndim]
    # Gates in the shape of keys: a decay for each channel, or one for all.
    rows = (query, key, value, held_back(gate if gate.ndim == 4 else gate[..., None], dtype), beta[..., None])
    if cu_seqlens is None:
        found, last = _rule(rows, state, factor, size, dtype)
    else:
        packed = tuple(t[0] for t in rows)
        outs, lasts, places, numbers = [], [], [], []
        for number, place in by_length(cu_seqlens.tolist(), value.device):
            some, end = _rule(tuple(t[place] for t in packed), state[number], factor, size, dtype)
            outs.append(some.flatten(0, 1))
            lasts.append(end)
            places.append(place.flatten())
            numbers.append(number)
        # A group is some sequences: put all of them back in the order of the call.
        found = torch.cat(outs)[torch.cat(places).argsort()][None] if outs else value.to(dtype)
        last = torch.cat(lasts)[torch.cat(numbers).argsort()] if lasts else state.to(dtype)
    result = found.to(value.dtype)
    return (result if out is None else out.copy_(result)), last


def held_back(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Log decays of which sums and differences can be made: those whose decay is 0 in float32 or float64 are the same.

    The difference of two sums is as exact as their size allows: with -1e6 among the gates, which is as good as -inf, it
    is off by 0.06, and with -inf it is no number.
    """
    return gate.to(dtype).clamp(min=LEAST[dtype])


def by_length(starts: list[int], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences of one length are a batch: (their numbers [n], their tokens [n, length]) for each length."""
    groups: dict[int, list[int]] = {}
    for number, (start, end) in enumerate(pairwise(starts)):
        groups.setdefault(end - start, []).append(number)
    for length, numbers in groups.items():
        first = torch.tensor([starts[number] for number in numbers], device=device)
        yield torch.tensor(numbers, device=device), first[:, None] + torch.arange(length, device=device)


def _rule(
    rows: tuple[Tensor, ...], state: Tensor, factor: float, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute sequences of one length. rows: query, key, value, gate, beta [B, S, heads, width], of which queries and
    keys may have fewer heads; state [B, H_v, D, D_v] -> (out [B, S, H_v, D_v], state)."""
    (S, heads), shared = rows[2].shape[1:3], rows[0].shape[2]
    q, k, v, g, b = (t.to(dtype).transpose(1, 2) for t in rows)
    q, k = (t.repeat_interleave(heads // shared, 1) if heads != shared else t for t in (q, k))
    state, q = state.to(dtype), q * factor
    if S == 1:
        state = state * g.mT.exp()
        u = b * (v - k @ state)
        state = state + k.mT @ u
        return (q @ state).transpose(1, 2), state
    size = min(size, max(S, 1))
    if over := -S % size:
        # Tokens without a key change no state.
        q, k, v, g, b = (F.pad(t, (0, 0, 0, over)) for t in (q, k, v, g, b))
    q, k, v, g, b = (t.reshape(*t.shape[:2], -(-S // size), size, t.shape[3]) for t in (q, k, v, g, b))
    G = g.cumsum(3)
    outs = []
    if g.shape[-1] == 1:  # one product for all chunks
        decay = _decays(G)[..., 0]
        fresh, wiped = _solved(k @ k.mT * decay, k, v, b, G)
        seen = q @ k.mT * decay
    for n in range(q.shape[2]):
        if g.shape[-1] > 1:
            decay = _decays(G[:, :, n])
            near = torch.einsum("bhid,bhjd,bhijd->bhij", k[:, :, n], k[:, :, n], decay)
            own, erased = _solved(near, k[:, :, n], v[:, :, n], b[:, :, n], G[:, :, n])
            looked = torch.einsum("bhid,bhjd,bhijd->bhij", q[:, :, n], k[:, :, n], decay)
        else:
            own, erased, looked = fresh[:, :, n], wiped[:, :, n], seen[:, :, n]
        at, end = G[:, :, n], G[:, :, n, -1:]
        new = own - erased @ state
        outs.append((q[:, :, n] * at.exp()) @ state + looked @ new)
        state = state * end.mT.exp() + (k[:, :, n] * (end - at).exp()).mT @ new
    out = torch.cat(outs, 2)[:, :, :S] if outs else v.flatten(2, 3) * 1.0
    return out.transpose(1, 2), state


def _decays(G: Tensor) -> Tensor:
    """[..., C, D] -> exp(G_i - G_j) [..., C, C, D], 0 for j > i, where the difference could overflow."""
    C = G.shape[-2]
    later = torch.ones(C, C, dtype=torch.bool, device=G.device).triu(1)[..., None]
    return (G[..., :, None, :] - G[..., None, :, :]).masked_fill(later, float("-inf")).exp()


def _solved(near: Tensor, key: Tensor, value: Tensor, beta: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """(T (beta v), T (beta k e^G))."""
    right = torch.cat([beta * value, beta * key * G.exp()], -1)
    # What is on and above the diagonal is not read: that it is 1 and 0 is part of the call.
    solved = torch.linalg.solve_triangular((beta * near).tril(-1), right, upper=False, unitriangular=True)
    return solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]
