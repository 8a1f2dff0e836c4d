"""`additive_mask`: bool masks by a kernel that only adds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..contract import AttentionRequest, Bound
from ..contract.request import changed
from .base import Lowering, Rewrite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AdditiveMask"]


class AdditiveMask(Lowering):
    """True adds 0, False adds -inf (S8)."""

    name = "additive_mask"
    summary = "a bool mask becomes an additive one of 0 and -inf"
    fields = frozenset({"mask"})

    def rewrites(self, request: AttentionRequest) -> Iterable[Rewrite]:
        # Narrower dtypes have no infinity. A tree mask stays what its kernels read.
        floats = request.dtype in ("float64", "float32", "bfloat16", "float16")
        softmax = request.family in ("dense", "varlen", "paged", "mla")
        if request.mask == "bool" and floats and softmax and not request.tree:
            # Written once and read by the kernel instead of the smaller one.
            yield Rewrite((changed(request, mask="additive"),), 2.0, detail=f"0 and -inf in {request.dtype}")

    def bind(
        self, request: AttentionRequest, rewrite: Rewrite, inner: Sequence[Bound], helpers: Sequence[Bound]
    ) -> Bound:
        import torch

        from .lengths import with_mask
        from .tensors import adapt

        dtype: torch.dtype = getattr(torch, request.dtype)

        def additive(mask: Tensor) -> Tensor:
            # What is expanded over the batch or the heads stays one.
            one = mask[: 1 if mask.stride(0) == 0 else None, : 1 if mask.stride(1) == 0 else None]
            return torch.zeros(one.shape, dtype=dtype, device=one.device).masked_fill_(~one, -math.inf)

        return adapt(inner[0], extra=with_mask(additive))
