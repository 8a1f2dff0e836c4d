"""What the emulated operators share: masks by mode, the softmax, and what a row without keys gives.

Sources: op-plugin 517f2e7 (August 2026), docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md (sparse_mode,
inner_precise) and torch_npu-npu_fused_infer_attention_score_v2.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.testing.emulators import arithmetic

__all__ = ["Rows", "attend", "check", "hidden", "scores"]


def check(held: bool, message: str) -> None:
    """The operators answer with a RuntimeError (TORCH_CHECK, or an error code of aclnn)."""
    if not held:
        raise RuntimeError(message)


def hidden(mode: int, mask: Tensor | None, before: int, after: int, s_q: int, s_k: int) -> Tensor | None:
    """Which pairs are hidden, bool [..., S_q, S_k]; None = none. Without a mask modes and bounds are ignored."""
    if mask is None:
        return None
    check(mask.dtype in (torch.bool, torch.int8, torch.uint8), "atten_mask must be bool, int8 or uint8")
    check(mask.is_contiguous(), "atten_mask must be contiguous")
    distance = torch.arange(s_k) - torch.arange(s_q)[:, None]
    if mode in (0, 1):
        check(mask.shape[-2:] == (s_q, s_k), f"atten_mask is {list(mask.shape)}, not [..., {s_q}, {s_k}]")
        # The band of mode 0 begins in the upper left corner.
        return mask.bool() if mode == 1 else mask.bool() | (distance > after) | (distance < -before)
    check(tuple(mask.shape) == (2048, 2048), "atten_mask of sparse_mode 2, 3 and 4 must be 2048 x 2048")
    check(torch.equal(mask.bool(), torch.ones(2048, 2048, dtype=torch.bool).triu(1)), "it must be the upper triangle")
    if mode == 2:
        return distance > 0
    check(mode in (3, 4), f"sparse_mode {mode} is not emulated")
    distance = distance - (s_k - s_q)
    return distance > 0 if mode == 3 else (distance > after) | (distance < -before)


def scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled logits [B, N, S_q, S_k] of [B, N, S_q, D] and [B, N_kv, S_k, D], in float32."""
    return arithmetic.scores(query.transpose(1, 2), key.transpose(1, 2), scale)


class Rows(NamedTuple):
    """out [B, N, S_q, D_v], top and total [B, N, S_q] of the exponentials."""

    out: Tensor
    top: Tensor
    total: Tensor


def attend(
    logits: Tensor, value: Tensor, unseen: Tensor | None, *, repaired: bool, keep: float = 1.0, rounded: torch.dtype
) -> Rows:
    """The softmax over what is not `unseen`. Statistics of a row that sees nothing are documented nowhere: NaN. Its
    output is 0 where such rows are repaired, and else "loses precision": all values weigh the same."""
    blind = None
    if unseen is not None:
        unseen = unseen.expand(logits.shape)
        blind = unseen.all(-1)
        logits = logits.masked_fill(unseen, -torch.inf)
        logits = logits.masked_fill(blind[..., None], 0.0)
    top = logits.amax(-1)
    weights = torch.exp(logits - top[..., None])
    total = weights.sum(-1)
    weights = weights / total[..., None]
    if keep < 1.0:
        weights = weights * torch.bernoulli(torch.full_like(weights, keep)) / keep
    out = arithmetic.weighted(weights.to(rounded).float(), value.transpose(1, 2)).transpose(1, 2).to(rounded)
    if blind is not None:
        out = out.masked_fill(blind[..., None], 0.0) if repaired else out
        top, total = (t.masked_fill(blind, torch.nan) for t in (top, total))
    return Rows(out, top, total)
