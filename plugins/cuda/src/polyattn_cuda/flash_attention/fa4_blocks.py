"""Family `block_sparse` by FlashAttention 4: `_flash_attn_fwd` with lists of key blocks. Forward only.

From its source (block_sparsity.py, block_sparse_utils.py of 4.0.0b36): lists are of blocks that its mask function
looks at, and of whole ones, which these are; a block is a tile of keys, and on Blackwell two tiles of queries; lists
are walked from their end, and only the block there is cut off where the keys end: the last one has to be listed last.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import load, with_aligned_inputs
from polyattn.contract import AttentionRequest, Bound
from polyattn.semantics.block_maps import check_block_map, flags_of, lists_of

from ..records.common import FLASH_ATTN_4

__all__ = ["BlockSparse"]


class BlockSparse:
    """Binds requests with a map."""

    def bind(self, request: AttentionRequest) -> Bound:
        needs = {"block_sparse_tensors": "a map of blocks", "pack_gqa": "heads with maps of their own"}
        kernel = functools.partial(
            load(FLASH_ATTN_4, "flash_attn.cute.interface:_flash_attn_fwd", needs),
            softmax_scale=request.softmax_scale,
            return_lse=request.lse,
            # Heads of a group in one tile would have to share a map.
            pack_gqa=False,
        )
        lists = load(FLASH_ATTN_4, "flash_attn.cute.block_sparsity:BlockSparseTensorsTorch")
        block_q, block_k = request.block_shape

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            block_counts: Tensor,
            block_indices: Tensor,
            out: Tensor | None = None,
            **_: Any,
        ) -> Any:
            check_block_map(query, key, request.block_shape, block_counts, block_indices)
            seen = flags_of(block_counts, block_indices, -(-key.shape[2] // block_k))
            # What sees nothing is shown a block, and blanked.
            alive = seen.any(-1)
            seen[..., 0] |= ~alive
            counts, indices = lists_of(seen)
            blocks = lists(
                mask_block_cnt=torch.zeros_like(counts),
                mask_block_idx=torch.zeros_like(indices[..., :1]),
                full_block_cnt=counts,
                full_block_idx=indices,
                block_size=(block_q, block_k),
            )
            q, k, v = (t.transpose(1, 2) for t in (query, key, value))
            result, lse, *_rest = kernel(q, k, v, block_sparse_tensors=blocks)
            blank = ~alive.repeat_interleave(block_q, -1)[..., : query.shape[2]]
            result = result.transpose(1, 2).masked_fill(blank[..., None], 0.0)
            result = result if out is None else out.copy_(result)
            return (result, lse.masked_fill(blank, -torch.inf)) if request.lse else result

        return with_aligned_inputs(Bound(forward))
