"""Family `dense` by AITER's SageAttention 1 (`fav3_sage`): INT8 scores, values in FP8.

From its source (aiter/ops/triton/attention/fav3_sage.py): "bshd" or "bhsd"; causal from the lower right corner; keys
are centred inside, on a copy, and the LSE [B, H_q, S_q] is corrected for it; the result is bfloat16, whatever it is
given, although its docstring says float32.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from polyattn.adapters import load, with_positive_scale
from polyattn.contract import AttentionRequest, Bound

from ..records.common import AITER_0_1_20

__all__ = ["AiterSage"]

_TARGET = "aiter.ops.triton.attention.fav3_sage:fav3_sage_wrapper_func"


class AiterSage:
    """Binds dense requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed build lacks the kernel.
        """
        return with_positive_scale(request, _bind)


def _bind(request: AttentionRequest) -> Bound:
    given = {
        "softmax_scale": request.softmax_scale,
        "causal": request.causal != "none",
        "layout": request.layout.lower(),
        "return_lse": request.lse,
        "smooth_k": True,
    }
    kernel = functools.partial(load(AITER_0_1_20, _TARGET, dict.fromkeys(given, "polyattn")), **given)

    def forward(query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None, **_: None) -> Any:
        found = kernel(query, key, value)
        result, lse = found if request.lse else (found, None)
        result = result.to(query.dtype) if out is None else out.copy_(result)
        if lse is None:
            return result
        return result, lse.transpose(1, 2) if request.layout == "BSHD" else lse

    return Bound(forward)
