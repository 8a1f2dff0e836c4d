"""Family `block_sparse` by fastvideo-kernel, the kernels of video sparse attention: blocks of 64, some with fewer keys.

From its source (2f3d4074): lengths are whole blocks, the scale is D^-0.5, heads have keys of their own. A block without
keys would make NaN of what is summed, so none is given to it. Autograd goes through it, by kernels of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import load
from polyattn.contract import AttentionRequest, Bound
from polyattn.semantics.block_maps import check_block_map, flags_of

from .records.diffusion import FASTVIDEO

__all__ = ["BlockSparse"]


class BlockSparse:
    """Binds requests with a map."""

    def bind(self, request: AttentionRequest) -> Bound:
        names = dict.fromkeys(("block_map", "variable_block_sizes"), "polyattn")
        kernel = load(FASTVIDEO, "fastvideo_kernel:block_sparse_attn", names)
        block = request.block_shape[0]

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            block_counts: Tensor,
            block_indices: Tensor,
            block_valid: Tensor | None = None,
            out: Tensor | None = None,
            **_: Any,
        ) -> Tensor:
            check_block_map(query, key, request.block_shape, block_counts, block_indices, block_valid)
            (B, H, S_q), S_k = query.shape[:3], key.shape[2]
            starts = torch.arange(0, S_k, block, dtype=torch.int32, device=key.device)
            sizes = (S_k - starts).clamp(max=block)
            seen = flags_of(block_counts, block_indices, len(sizes))
            if block_valid is not None:
                # Where no key counts at all nobody sees any, whatever this block holds.
                sizes = torch.minimum(sizes, block_valid)
                sizes = torch.where((sizes > 0).any(), sizes, sizes + 1)
                seen = seen & (torch.minimum(sizes, block_valid) > 0)
            # What sees nothing is shown a block with keys, and blanked.
            alive = seen.any(-1)
            numbers = torch.arange(len(sizes), device=sizes.device)
            seen = seen | (~alive[..., None] & (numbers == sizes.argmax()))
            key, value = (t.repeat_interleave(H // t.shape[1], 1) if t.shape[1] < H else t for t in (key, value))
            whole = [torch.nn.functional.pad(t, (0, 0, 0, -t.shape[2] % block)) for t in (query, key, value)]
            flags = seen.expand(B, H, -1, -1).contiguous()
            found, _ = kernel(*whole, block_map=flags, variable_block_sizes=sizes)
            blank = ~alive.repeat_interleave(block, -1)[..., :S_q, None]
            result: Tensor = found[:, :, :S_q].masked_fill(blank, 0.0)
            return result if out is None else out.copy_(result)

        return Bound(forward)
