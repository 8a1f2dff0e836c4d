"""The `sage_sla_attn` method with scores of 8-bit integers, by a kernel of this package."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyattn.contract import Inner
from polyattn.methods.video.sla import SageSLA as Emulated
from polyattn.semantics.validation import has_shapes_only

from . import runtime
from .kernels import eight_bits
from .kernels.block_sparse import Lists

__all__ = ["SageSLA"]


class SageSLA(Emulated):
    """`SageSLA` computes the exact branch in one kernel, where core emulates its rounding. Forward only."""

    own_kernels: ClassVar[tuple[str, ...]] = ("8-bit scores: polyattn-triton",)

    def _exact(self, query: Tensor, key: Tensor, value: Tensor, inner: Inner, lists: tuple[Tensor, Tensor]) -> Tensor:
        if has_shapes_only(query):
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        runtime.check_device(query.device)
        found = Lists(*(t.to(torch.int32) for t in lists), None, *self.blocks)
        return eight_bits.attend(query, key, value, found, scale=query.shape[-1] ** -0.5)
