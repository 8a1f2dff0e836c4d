"""fastvideo-kernel's block-sparse attention.

Traps that are here as they are there: a block without keys that comes first gives no numbers, nor does a row without
blocks; a map is read by strides of its own and is for all samples and heads; the second result's gradient is ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES

__all__ = ["library"]

BLOCK = 64


def library() -> Library:
    lib = Library("fastvideo-kernel", "0.3.5", "fastvideo_kernel", signatures=SIGNATURES)

    @lib.function("fastvideo_kernel", "fastvideo_kernel.block_sparse_attn")
    def block_sparse_attn(
        q: Tensor, k: Tensor, v: Tensor, block_map: Tensor, variable_block_sizes: Tensor
    ) -> tuple[Tensor, Tensor]:
        (B, H, S_q, D), S_k = q.shape, k.shape[2]
        assert q.dtype == torch.bfloat16, "the kernels of SM90 take nothing else"
        assert D in (64, 128)
        assert k.shape == v.shape == (B, H, S_k, D), "no GQA"
        assert S_q % BLOCK == 0, f"q length must be a multiple of 64, but got {S_q}"
        assert S_k % BLOCK == 0, f"kv length must be a multiple of 64, but got {S_k}"
        assert block_map.shape == (B, H, S_q // BLOCK, S_k // BLOCK)
        assert block_map.dtype == torch.bool
        assert variable_block_sizes.numel() == S_k // BLOCK
        place = torch.arange(S_k)
        counts = place % BLOCK < variable_block_sizes.repeat_interleave(BLOCK)
        seen = block_map.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3) & counts
        logits = (q.float() @ k.float().mT / D**0.5).masked_fill(~seen, -torch.inf)
        weights = logits.softmax(-1)
        empty = (block_map & (variable_block_sizes == 0)).any(-1).repeat_interleave(BLOCK, -1)
        weights = torch.where(empty[..., None], torch.nan, weights)
        return (weights.bfloat16().float() @ v.float()).bfloat16(), logits.logsumexp(-1).detach()

    return lib
