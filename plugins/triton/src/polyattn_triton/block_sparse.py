"""The `triton` backend's block-sparse attention: requests of family `block_sparse`, which carry a block map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Bound
from polyattn.semantics.block_maps import check_block_map

from . import runtime
from .hopper import block_sparse as hopper
from .kernels import block_sparse as kernels

__all__ = ["BlockSparse"]


class BlockSparse:
    """Binds requests with a map: forward with LSE, and a backward that accepts a substituted (out, lse)."""

    def bind(self, request: AttentionRequest) -> Bound:
        scale = request.softmax_scale
        with_lse = request.lse or bool(request.grad)
        block_q, block_k = request.block_shape
        hopper_takes = request.platform == "cuda" and hopper.takes(
            getattr(torch, request.dtype), request.head_dim, request.block_shape, scale
        )

        def lists(
            query: Tensor,
            key: Tensor,
            counts: Tensor,
            indices: Tensor,
            valid: Tensor | None,
            starts: Tensor | None,
        ) -> kernels.Lists:
            runtime.check_device(query.device)
            check_block_map(query, key, request.block_shape, counts, indices, valid, starts)
            if starts is not None and valid is not None:
                starts, valid = starts.contiguous(), valid.contiguous()
            elif valid is not None:
                valid = _dense(valid)
            return kernels.Lists(_dense(counts), _dense(indices), valid, block_q, block_k, starts)

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            block_counts: Tensor,
            block_indices: Tensor,
            block_valid: Tensor | None = None,
            block_starts: Tensor | None = None,
            out: Tensor | None = None,
        ) -> Any:
            lse = query.new_empty(query.shape[:3], dtype=torch.float32) if with_lse else None
            found = lists(query, key, block_counts, block_indices, block_valid, block_starts)
            if hopper_takes and request.batch_invariant:
                # Where a batch lies must not choose the kernel: its bits are not those of the other one.
                query, key, value = (hopper.reachable(tensor) for tensor in (query, key, value))
                result = torch.empty_like(query)
            else:
                result = torch.empty_like(query) if out is None else out
            on_hopper = hopper_takes and hopper.fits(query, key, value, result)
            attend = hopper.forward if on_hopper else kernels.forward
            attend(query, key, value, found, scale=scale, out=result, lse=lse)
            if out is not None and result is not out:
                result = out.copy_(result)
            return result if lse is None else (result, lse)

        def backward(
            dout: Tensor, query: Tensor, key: Tensor, *rest: Tensor,  # value, out, lse
            block_counts: Tensor, block_indices: Tensor, block_valid: Tensor | None = None,
            block_starts: Tensor | None = None,
        ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
            found = lists(query, key, block_counts, block_indices, block_valid, block_starts)
            value, out, lse = rest
            return kernels.backward(_dense(dout), query, key, value, out, lse, found, scale=scale)

        return Bound(forward, backward if request.grad else None)


def _dense(tensor: Tensor) -> Tensor:
    """`tensor` with a dense last axis."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
