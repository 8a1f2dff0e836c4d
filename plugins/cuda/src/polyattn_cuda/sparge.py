"""SpargeAttn: INT8 attention to the key blocks that it predicts to matter to a block of queries (family `dense`), or to
those that a call lists (family `block_sparse`).

From its source: D is 64 or 128, at least 128 queries, no causal flag reaches its kernels, keys are centred inside, on
a copy (`smooth_k=False` it cannot do without). At `topk` = 1 every block is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import load, with_aligned_inputs, with_positive_scale
from polyattn.contract import AttentionRequest, Bound
from polyattn.semantics.block_maps import check_block_map, flags_of

from .int8 import scaled, with_empty_channels
from .records.diffusion import SPARGE
from .unstreamed import on_default_stream

__all__ = ["Sparge", "SpargeBlocks"]

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
            result = _computed(kernel, q, k, v, given)
            result = result.transpose(1, 2) if turned else result
            return result if out is None else out.copy_(result)

        return Bound(forward)


class SpargeBlocks:
    """Binds requests with a map of blocks of 128 queries and 64 keys, which its flags are of."""

    def bind(self, request: AttentionRequest) -> Bound:
        return with_aligned_inputs(with_positive_scale(request, lambda positive: scaled(positive, self._bind)))

    def _bind(self, request: AttentionRequest) -> Bound:
        given: dict[str, Any] = {
            "scale": request.softmax_scale,
            "smooth_k": True,
            "pvthreshd": dict(request.options).get("pvthreshd", 50),
            "tensor_layout": "HND",
            "output_dtype": getattr(torch, request.dtype),
        }
        names = dict.fromkeys((*given, "mask_id"), "polyattn")
        kernel = load(SPARGE, "spas_sage_attn.core:block_sparse_sage2_attn_cuda", names)

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            block_counts: Tensor,
            block_indices: Tensor,
            out: Tensor | None = None,
            **_: Any,
        ) -> Tensor:
            check_block_map(query, key, request.block_shape, block_counts, block_indices)
            B, H, S_q = query.shape[:3]
            seen = flags_of(block_counts, block_indices, -(-key.shape[2] // request.block_shape[1]))
            # What sees nothing is shown a block, and blanked.
            alive = seen.any(-1)
            seen[..., 0] |= ~alive
            # It knows no groups.
            key, value = (t.repeat_interleave(H // t.shape[1], 1) if t.shape[1] < H else t for t in (key, value))
            flags = seen.expand(B, H, -1, -1).contiguous()
            result = _computed(kernel, query, key, value, {**given, "mask_id": flags})
            blank = ~alive.repeat_interleave(request.block_shape[0], -1)[..., :S_q, None]
            result = result.masked_fill(blank, 0.0)
            return result if out is None else out.copy_(result)

        return Bound(forward)


def _computed(kernel: Any, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> Tensor:
    """What a kernel makes of [B, H, S, D]: it takes no fewer than 128 queries."""
    missing = max(_FEWEST - query.shape[2], 0)
    padded = torch.nn.functional.pad(query, (0, 0, 0, missing)) if missing else query
    result = with_empty_channels(on_default_stream(kernel, padded, key, value, **given), value, heads_first=True)
    return result[:, :, : query.shape[2]]
