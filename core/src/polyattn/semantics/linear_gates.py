"""The gates of linear attention from what models compute them of (S10)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["computed_gates"]


def computed_gates(
    gate: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor | None = None,
    *,
    gate_bound: float = 0.0,
    beta_range: int = 1,
) -> tuple[Tensor, Tensor]:
    """(log decays, betas) in float32, or float64 for float64. Differentiable in every tensor.

    log decay = -exp(a_log) * softplus(gate + dt_bias), or, with gate_bound < 0, gate_bound * sigmoid(exp(a_log) *
    (gate + dt_bias)), which is never below the bound. beta = beta_range * sigmoid(beta).

    Args:
        gate: [B, S, H_v], or [B, S, H_v, D] with a decay for each channel. beta: [B, S, H_v]. a_log: [H_v].
        dt_bias: [H_v], or [H_v, D]; None = zeros.
    """
    wide = torch.promote_types(torch.promote_types(gate.dtype, a_log.dtype), torch.float32)
    raw, rate = gate.to(wide), a_log.to(wide).exp()
    if dt_bias is not None:
        raw = raw + dt_bias.to(wide)
    rate = rate[:, None] if gate.ndim == 4 else rate
    log_decay = gate_bound * torch.sigmoid(rate * raw) if gate_bound else -rate * F.softplus(raw)
    return log_decay, beta_range * torch.sigmoid(beta.to(wide))
