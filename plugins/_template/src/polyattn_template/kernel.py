"""The adapter that polyattn calls, and the kernel, which is yours to replace. Imported when it first serves a call."""

from __future__ import annotations

import torch
from torch import Tensor

# isort: split
from polyattn.contract import AttentionRequest, Bound

BLOCK = 64
"""Keys per step."""


class Adapter:
    """The target that `plugin.py` names."""

    def bind(self, request: AttentionRequest) -> Bound:
        """The function that serves exactly this request, called once per distinct request.

        Whatever is no tensor is read from `request` here; `forward` is the `DenseForward` of
        polyattn/contract/protocols.py.
        """
        scale = request.softmax_scale
        causal = request.causal == "bottom_right"
        bshd = request.layout == "BSHD"

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            attn_mask: Tensor | None = None,
            sinks: Tensor | None = None,
            out: Tensor | None = None,
        ) -> Tensor | tuple[Tensor, Tensor]:
            # The row declares neither masks nor sinks, so both are None here.
            if bshd:
                query, key, value = (t.transpose(1, 2) for t in (query, key, value))
            result, lse = tiled_attention(query, key, value, scale, causal)
            if bshd:
                result, lse = result.transpose(1, 2), lse.transpose(1, 2)
            out = result.to(query.dtype) if out is None else out.copy_(result)
            return (out, lse) if request.lse else out

        return Bound(forward)


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Replace this by your kernel.

    It walks over blocks of keys and keeps, per row, the highest logit so far, the sum of the weights and the weighted
    sum of the values, both relative to that logit (FlashAttention, arXiv:2205.14135, algorithm 1).

    Args:
        query: [B, H, S_q, D]; key: [B, H, S_k, D]; value: [B, H, S_k, D].
        scale: factor on the logits. causal: row i sees the keys j <= i + S_k - S_q; needs S_q <= S_k.

    Returns:
        out [B, H, S_q, D] and lse [B, H, S_q], natural logarithm, both float32.
    """
    s_q, s_k = query.shape[2], key.shape[2]
    # The last key that each row sees.
    last = torch.arange(s_q, device=query.device) + (s_k - s_q)
    top = torch.full(query.shape[:3], float("-inf"), device=query.device)
    total = torch.zeros(query.shape[:3], device=query.device)
    out = torch.zeros(query.shape, device=query.device)
    for start in range(0, s_k, BLOCK):
        stop = min(start + BLOCK, s_k)
        # Copied, as a kernel copies a tile to fast memory: inputs may have any strides, and matmul is at its best here.
        keys, values = (t[:, :, start:stop].float().contiguous() for t in (key, value))
        logits = scale * (query.float() @ keys.transpose(2, 3))
        if causal:
            places = torch.arange(start, stop, device=query.device)
            logits = logits.masked_fill(places > last[:, None], float("-inf"))
        # Every row sees key 0 at least, so `higher` is finite from the first block on.
        higher = torch.maximum(top, logits.amax(3))
        weights = torch.exp(logits - higher[..., None])
        keep = torch.exp(top - higher)
        total = total * keep + weights.sum(3)
        out = out * keep[..., None] + weights @ values
        top = higher
    return out / total[..., None], top + torch.log(total)
