"""Family `block_sparse` by FlashInfer's VariableBlockSparseAttentionWrapper. Inference only: it has no backward.

The wrapper takes a map of flags for each head, and lists it key by key, on the host too: each call waits for the
device, and takes an int32 for each key that a block of queries sees. Samples are heads to it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from polyattn.adapters import load
from polyattn.contract import AttentionRequest, Bound
from polyattn.semantics.block_maps import check_block_map, flags_of

from ..records.flashinfer import FLASHINFER
from .paged import check_reach, template
from .results import natural
from .scales import scale_of
from .workbench import LENDER, Workbench, float_bytes, int_bytes

__all__ = ["BlockSparse"]


class BlockSparse:
    """Binds requests with a map whose blocks cut the keys, some of them cut short."""

    def bind(self, request: AttentionRequest) -> Bound:
        return Bound(_Call(request).forward)


class _Call:
    """Everything of a request that is no tensor."""

    def __init__(self, request: AttentionRequest) -> None:
        r = self.request = request
        self.wrapper = load(FLASHINFER, "flashinfer:VariableBlockSparseAttentionWrapper")
        self.scale, self.factor = scale_of(r)
        self.backend, dtype = template(r), getattr(torch, r.dtype)
        self.options: dict[str, Any] = {
            "head_dim": r.head_dim,
            "causal": False,
            "sm_scale": self.scale,
            # What is copied while a plan is made is read by it.
            "non_blocking": False,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        block_counts: Tensor,
        block_indices: Tensor,
        block_valid: Tensor | None = None,
        out: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """`polyattn.contract.BlockSparseForward`.

        Raises:
            UnsupportedRequestError: there are more tokens than the kernels reach.
        """
        r = self.request
        (B, H, S_q, D), (H_kv, S_k), (block_q, block_k) = query.shape, key.shape[1:3], r.block_shape
        check_block_map(query, key, r.block_shape, block_counts, block_indices, block_valid)
        if self.factor is not None:
            query = query * self.factor
        rows = _sizes(S_q, block_q, query.device)
        columns = _sizes(S_k, block_k, query.device)
        seen, first = flags_of(block_counts, block_indices, len(columns)), 1
        if block_valid is not None:
            first = 2
            # What is cut off is a block that nobody sees: the sizes of a head add up to its keys.
            valid = torch.minimum(block_valid, columns)
            columns = torch.stack([valid, columns - valid], 1).flatten()
            seen = torch.stack([seen, torch.zeros_like(seen)], -1).flatten(-2)
        alive = (seen & (columns > 0)).any(-1)
        # Blocks that see nothing are shown the first keys, and blanked: a plan without any keys is an error.
        seen[..., :first] |= ~alive[..., None]
        alive = alive.repeat_interleave(block_q, -1)[..., :S_q].expand(B, H, S_q)
        heads = H_kv
        if seen.shape[1] > 1 and heads < H:  # heads of a group have maps of their own
            key, value, heads = (*(t.repeat_interleave(H // H_kv, 1) for t in (key, value)), H)
        maps = seen.expand(B, heads, *seen.shape[2:]).flatten(0, 1)
        q, k, v = (t.flatten(0, 1) for t in (query, key, value))
        if self.backend != "fa3":
            check_reach(B * heads * max(S_q, S_k), H // heads, D)
        with LENDER.lend(query.device) as bench:
            wrapper = self._planned(bench, maps, rows, columns, H // heads, B * heads * S_q)
            found = wrapper.run(q=q, k=k, v=v, return_lse=r.lse)
        found, made = found if r.lse else (found, None)
        found = found.view(query.shape).masked_fill_(~alive[..., None], 0.0)
        found = found if out is None else out.copy_(found)
        if (lse := natural(made)) is None:
            return found
        return found, lse.view(B, H, S_q).masked_fill_(~alive, -torch.inf)

    def _planned(self, bench: Workbench, maps: Tensor, rows: Tensor, columns: Tensor, group: int, tokens: int) -> Any:
        """A wrapper with a plan for these maps [heads, nQ, nK]; each block of queries of a head is a sequence to it."""
        heads = maps.shape[0]
        one, sequences = dataclasses.replace(self.request, heads=group, kv_heads=1), heads * len(rows)

        def make(workspace: Tensor) -> Any:
            return self.wrapper(float_workspace_buffer=workspace, backend=self.backend)

        wrapper = bench.wrapper((self.wrapper, self.backend), make, float_bytes(one, bench.device, sequences, tokens))
        with bench.planning(wrapper):
            if self.backend == "fa3":
                bench.stage(wrapper, int_bytes(one, sequences, tokens))
            wrapper.plan(
                block_mask_map=maps,
                block_row_sz=rows.expand(heads, -1),
                block_col_sz=columns.expand(heads, -1),
                num_qo_heads=heads * group,
                num_kv_heads=heads,
                **self.options,
            )
        return wrapper


def _sizes(tokens: int, block: int, device: torch.device) -> Tensor:
    """int32 [blocks], the tokens of each block."""
    starts = torch.arange(0, tokens, block, dtype=torch.int32, device=device)
    return (tokens - starts).clamp(max=block)
