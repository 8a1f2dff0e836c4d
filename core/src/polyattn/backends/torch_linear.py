"""`torch_native` of linear attention: the chunked form in PyTorch's own operators."""

from __future__ import annotations

import functools

from ..contract import AttentionRequest, Bound
from ..semantics.delta_rule import chunked_delta_rule

__all__ = ["TorchLinear"]


class TorchLinear:
    """Binds linear requests. Autograd runs through the operators, so `forward` is differentiable itself."""

    def bind(self, request: AttentionRequest) -> Bound:
        return Bound(functools.partial(chunked_delta_rule, scale=request.scale))
