"""The gated delta rule token by token in float32, as the kernels of several libraries compute it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["recurrence", "softplus_decay", "unit"]


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One sequence: q, k [T, H, K], v [T, HV, V], decay [T, HV] or [T, HV, K] (no logarithm), beta [T, HV], state
    [HV, K, V] -> out [T, HV, V] and the states after all tokens [T, HV, K, V], in float32."""
    group, outs, states, now = v.shape[1] // q.shape[1], [], [], state.float()
    q, k = (t.float().repeat_interleave(group, 1) for t in (q, k))
    decay = decay.float() if decay.ndim == 3 else decay.float()[..., None]
    for t in range(v.shape[0]):
        now = now * decay[t, :, :, None]
        new = beta[t].float()[:, None] * (v[t].float() - (now * k[t, :, :, None]).sum(1))
        now = now + k[t, :, :, None] * new[:, None]
        states.append(now)
        outs.append(scale * (now * q[t, :, :, None]).sum(1))
    # A sequence without tokens has the state that it began with.
    return (torch.stack(outs) if outs else v.float()), torch.stack(states or [now])


def sequences(tokens: int, starts: Sequence[int] | None, batch: int) -> list[slice]:
    """Where each sequence lies among packed tokens."""
    if starts is None:
        return [slice(n * tokens, (n + 1) * tokens) for n in range(batch)]
    return [slice(start, end) for start, end in pairwise(starts)]


def softplus_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The decay of raw gates [..., HV] or [..., HV, K]."""
    rate = A_log.float().exp()
    x = a.float() + dt_bias.float()
    softplus = torch.where(x > 20, x, x.clamp(max=20).exp().log1p())
    return (-(rate if dt_bias.ndim == 1 else rate[:, None]) * softplus).exp()


def unit(*rows: Tensor) -> tuple[Tensor, ...]:
    """Rows of length 1, in float32."""
    return tuple(row.float() * (row.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for row in rows)
