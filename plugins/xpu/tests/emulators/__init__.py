"""Libraries for Intel hardware in plain torch on the CPU, one file for each, and the arithmetic that they share."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from polyattn.testing.emulators import Signatures
from polyattn.testing.emulators.arithmetic import band, lse_of, scores, weighted, weights_of

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
    seen = band(q.shape[0], k.shape[0], window[0], 0 if causal else window[1])
    s = scores(q, k, scale, seen, softcap)
    lse = lse_of(s, sink)
    out = weighted(weights_of(s, lse).to(q.dtype).float(), v)
    return out.masked_fill(~seen.any(-1)[:, None, None], torch.nan).to(q.dtype), lse
