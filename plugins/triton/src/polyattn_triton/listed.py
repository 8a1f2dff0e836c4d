"""Family `mla` with lists of tokens, by `kernels/listed.py`: decode and extend of DeepSeek sparse attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Bound, PagedTables
from polyattn_triton import runtime
from polyattn_triton.kernels import listed

__all__ = ["Listed"]


class Listed:
    """Binds latent requests with `token_topk`."""

    def bind(self, request: AttentionRequest) -> Bound:
        def forward(
            query: Tensor,
            cache: Tensor,
            *,
            tables: PagedTables,
            token_indices: Tensor,
            attn_mask: None = None,
            out: Tensor | None = None,
        ) -> Any:
            """A `contract.MLAForward`."""
            runtime.check_device(query.device)
            tokens, heads, _ = query.shape
            if out is None:
                out = query.new_empty(tokens, heads, request.dims[1])
            lse = query.new_empty(tokens, heads, dtype=torch.float32) if request.lse else None
            if tokens:
                parts = listed.parts_for(query.device, tokens, heads, request.token_topk)
                indices = token_indices if token_indices.stride(1) == 1 else token_indices.contiguous()
                listed.attend(
                    query, cache, indices, tables=tables, scale=request.softmax_scale, out=out, lse=lse, parts=parts
                )
            return out if lse is None else (out, lse)

        return Bound(forward)
