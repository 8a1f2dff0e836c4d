"""Libraries for Intel hardware in plain torch on the CPU, one file for each, and the arithmetic that they share."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from polyattn.testing.emulators import Signatures

__all__ = ["SIGNATURES", "attend", "check", "poisoned"]

SIGNATURES = Signatures(Path(__file__).parents[1] / "signatures.json")


def check(held: bool, message: str) -> None:
    """TORCH_CHECK."""
    if not held:
        raise RuntimeError(message)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """at::empty: what was never written is seen."""
    return torch.full(shape, torch.nan, dtype=dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence, [S_q, H_q, D] and [S_k, H_kv, D]: out [S_q, H_q, D_v] in the values' precision, LSE [H_q, S_q].

    Bottom-right: query i is at i + S_k - S_q. Weights are rounded to the queries' dtype before they meet the values, as
    matrix engines want them. A row that sees no key gets NaN.
    """
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.float(), wide_k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    position = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    gap = torch.arange(k.shape[0]) - position
    left, right = window
    seen = torch.ones_like(gap, dtype=torch.bool)
    if causal:
        right = 0
    if right >= 0:
        seen &= gap <= right
    if left >= 0:
        seen &= gap >= -left
    s = s.masked_fill(~seen, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink.float()[:, None, None].expand(-1, s.shape[1], 1)], -1)
    lse = s.logsumexp(-1) if s.shape[-1] else s.new_full(s.shape[:2], -torch.inf)
    weights = (s - lse[..., None]).exp()[..., : k.shape[0]].to(q.dtype).float()
    out = torch.einsum("hqk,khd->qhd", weights, wide_v)
    return out.masked_fill(~seen.any(-1)[:, None, None], torch.nan).to(q.dtype), lse
