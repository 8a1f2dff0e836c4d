"""The short causal convolution before linear attention, with the tail that it carries from call to call (S10)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .delta_rule import by_length

__all__ = ["causal_conv"]


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tail: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    every_state: bool = False,
    parents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """silu(bias + sum_w weight[:, w] * x_(t - W + 1 + w)) of each channel, the inputs before the first being the tail.

    Args:
        x: [B, S, C]. weight: [C, W]. bias: [C].
        tail: [N, C, W - 1], the last inputs of each sequence, the latest at the end. None = zeros. It is not written.
        cu_seqlens: integers [N+1], with B = 1: sequences behind each other, read on the host. None: N = B.
        every_state: the tokens are drafts: return the tails after all of them. parents: integers [B, S], the draft
            before each, -1 = the tail. None: a chain.

    Returns:
        (out [B, S, C] in the dtype of x, the tail after the last token, in that of x; with every_state
        [B, S, C, W - 1]).
    """
    W = weight.shape[1]
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    before = x.new_zeros(count, x.shape[2], W - 1) if tail is None else tail.to(x.dtype)
    if cu_seqlens is None:
        return _convolved(x, weight, bias, before, every_state, parents)
    out, last = torch.empty_like(x), before.clone()
    for number, place in by_length(cu_seqlens.tolist(), x.device):
        out[0, place], last[number] = _convolved(x[0, place], weight, bias, before[number], False, None)
    return out, last


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, every_state: bool, parents: Tensor | None
) -> tuple[Tensor, Tensor]:
    (B, S, C), W = x.shape, weight.shape[1]
    seen = torch.cat([tail.mT, x], 1)  # [B, W - 1 + S, C]
    if not S:
        return x, tail.contiguous()
    if not every_state:
        out = F.conv1d(seen.mT, weight[:, None].to(x.dtype), None if bias is None else bias.to(x.dtype), groups=C)
        return F.silu(out).mT.contiguous(), seen[:, S:].mT.contiguous()
    order = torch.arange(S, device=x.device).expand(B, S)
    # Where in `seen` the input before each of its rows is: the parent of a draft, or the one before in the tail.
    earlier = order - 1 if parents is None else parents.long()
    step = torch.cat([torch.arange(-1, W - 2, device=x.device).clamp(min=0).expand(B, W - 1), earlier + W - 1], 1)
    window = [order + W - 1]
    for _ in range(W - 1):
        window.insert(0, step.gather(1, window[0]))
    rows = torch.stack([seen.gather(1, at[..., None].expand(B, S, C)) for at in window], 3)  # [B, S, C, W]
    out = (rows * weight.to(x.dtype)).sum(-1)
    return F.silu(out if bias is None else out + bias.to(x.dtype)), rows[..., 1:].contiguous()
