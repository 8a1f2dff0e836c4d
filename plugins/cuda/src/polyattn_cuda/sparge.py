"""Family `dense` by SpargeAttn: INT8 attention to the key blocks that it predicts to matter to a block of queries.

From its source: D is 64 or 128, at least 128 queries, no causal flag reaches its kernels, keys are centred inside, on
a copy (`smooth_k=False` it cannot do without). At `topk` = 1 every block is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import load, with_aligned_inputs, with_positive_scale
from polyattn.contract import AttentionRequest, Bound

from .int8 import scaled, with_empty_channels
from .records.diffusion import SPARGE
from .unstreamed import on_default_stream

__all__ = ["Sparge"]

_FEWEST = 128


class Sparge:
    """Binds dense requests. Its functions copy what they are given into [B, H, S, D], and choose blocks by scores that
    are not scaled yet: scales of 0 and less go into the queries."""

    def bind(self, request: AttentionRequest) -> Bound:
        return with_aligned_inputs(with_positive_scale(request, lambda positive: scaled(positive, self._bind)))

    def _bind(self, request: AttentionRequest) -> Bound:
        options: dict[str, Any] = dict(request.options)
        given: dict[str, Any] = {
            "is_causal": False,
            "scale": request.softmax_scale,
            "smooth_k": True,
            "topk": float(options.get("topk", 0.5)),
            "pvthreshd": options.get("pvthreshd", 50),
            "tensor_layout": "HND",
            "output_dtype": getattr(torch, request.dtype),
        }
        target = "spas_sage_attn.core:spas_sage2_attn_meansim_topk_cuda"
        kernel = load(SPARGE, target, dict.fromkeys(given, "polyattn"))
        turned = request.layout == "BSHD"

        def forward(query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None, **_: Any) -> Tensor:
            q, k, v = (t.transpose(1, 2) if turned else t for t in (query, key, value))
            missing = max(_FEWEST - q.shape[2], 0)
            padded = torch.nn.functional.pad(q, (0, 0, 0, missing)) if missing else q
            result = with_empty_channels(on_default_stream(kernel, padded, k, v, **given), v, heads_first=True)
            result = result[:, :, : q.shape[2]]
            result = result.transpose(1, 2) if turned else result
            return result if out is None else out.copy_(result)

        return Bound(forward)
