"""torch's FlexAttention, compiled for the shape of the row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from polyattn.bench.measure import Call, Inputs
from polyattn.errors import UnsupportedRequestError

from .common import called, heads_first, only, scale_of, window_of

__all__ = ["flex"]

# A program for each row; torch gives up after a few of one function unless it is told otherwise.
torch._dynamo.config.recompile_limit = 1024
torch._dynamo.config.accumulated_recompile_limit = 4096


def flex(inputs: Inputs) -> Call:
    request = only(inputs, ("dense",), "causal", "v_head_dim", "window", "softcap", "grad")
    if request.s_relation != "equal" and request.causal != "none":
        raise UnsupportedRequestError("called here with equal lengths, or without a causal mask")
    s_q, s_k = inputs.workload.longest
    left, right = window_of(request)
    causal, cap = request.causal != "none", request.softcap

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = query >= key if causal else query >= 0
        found = found & (query - key <= left) if left >= 0 else found
        return found & (key - query <= right) if right >= 0 else found

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    masked = causal or left >= 0 or right >= 0
    mask = create_block_mask(seen, None, None, s_q, s_k, device=str(inputs.device)) if masked else None

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled(
            query, key, value,
            score_mod=capped if cap else None, block_mask=mask, scale=scale_of(request), enable_gqa=request.group > 1,
        )  # fmt: skip

    return called(inputs, forward, [heads_first(inputs, number) for number in range(inputs.count)], first=True)
