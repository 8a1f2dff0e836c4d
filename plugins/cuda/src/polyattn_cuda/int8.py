"""What the INT8 kernels of SageAttention 2 and SpargeAttn get wrong, given to them in another way.

From their sources (csrc of d1a57a5 and bfd980b): where V becomes FP8, a channel is divided by its largest element, and
0 by 0 is NaN; keys that a mask or the end of a tile leaves out have a logit of -5e6, which the scale is applied to
afterwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Bound

__all__ = ["scaled", "with_empty_channels"]

_LEAST_SCALE = 1e-4
"""Times -5e6 it leaves nothing of a weight."""
_LEAST_VALUE = 2.0**-118
"""What FP8's largest number can be divided by in float32."""


def scaled(request: AttentionRequest, bind: Callable[[AttentionRequest], Bound]) -> Bound:
    """`bind` of a request whose scale is above 0 and not too small: what is missing goes into the queries, as a power
    of two, which rounds nothing."""
    if request.scale is None or request.scale >= _LEAST_SCALE:
        return bind(request)
    factor = 2.0 ** math.floor(math.log2(request.scale / _LEAST_SCALE))
    bound = bind(dataclasses.replace(request, scale=request.scale / factor))

    def forward(query: Tensor, *tensors: Tensor, **kw: Any) -> Any:
        return bound.forward(query * factor, *tensors, **kw)

    return Bound(forward)


def with_empty_channels(result: Tensor, value: Tensor, heads_first: bool) -> Tensor:
    """`result` with 0 in the channels of V that hold nothing but zeros, whatever the kernel made of them. In place.

    Args:
        result: [B, S_q, H_q, D_v], heads_first: [B, H_q, S_q, D_v]. value: [B, S_k, H_kv, D_v] or [B, H_kv, S_k, D_v].
    """
    heads, length = (1, 2) if heads_first else (2, 1)
    empty = torch.linalg.vector_norm(value, torch.inf, length, keepdim=True) < _LEAST_VALUE
    group = result.shape[heads] // value.shape[heads]
    return result.masked_fill_(empty if group == 1 else empty.repeat_interleave(group, heads), 0.0)
