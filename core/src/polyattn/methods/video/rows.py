"""Move tokens in blocks, score means of blocks and choose the best: by kernels of a plugin, else by torch.

Torch's operators are the definition. Kernels (`polyattn.contract.BlockOps`) do the same in one pass over memory; what
they lack is a derivative, which is made of themselves here.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from ...contract import BlockOps
from ...errors import InvalidInputError
from ...registry.device_ops import block_ops
from ...semantics.validation import has_shapes_only

__all__ = ["Blocks", "best", "check_beside", "kernels_for", "kernels_on", "pooled", "scored", "wants_grad"]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of the tokens of a call.

    Attributes:
        block: the most tokens of one. order: int32 [N], tokens block after block. starts, sizes: int32 [n], see
            `polyattn.contract.BlockOps`. tokens: S of the call, of which some may be in no block.
        filled: a block takes `block` rows, with zeros behind its tokens.
    """

    block: int
    order: Tensor
    starts: Tensor
    sizes: Tensor
    tokens: int
    filled: bool

    def ready(self) -> Blocks:
        """Compute all that calls need, while a plan is made: in inference mode it would be of no use for training."""
        for name in ("places", "owners", "shares"):
            getattr(self, name)
        return self

    @functools.cached_property
    def places(self) -> Tensor:
        """int32 [tokens], the row of each token; -1 = it is in no block."""
        return self._spread(self._rows)

    @functools.cached_property
    def owners(self) -> Tensor:
        """int32 [tokens], the block of each token; 0 where it is in none."""
        return self._spread(self._blocks).clamp(min=0)

    @functools.cached_property
    def shares(self) -> Tensor:
        """float32 [1, 1, tokens, 1], a token's share of the mean of its block; 0 where it is in none."""
        found = 1 / self.sizes.clamp(min=1).float()
        return torch.where(self.places >= 0, found[self.owners.long()], 0.0)[None, None, :, None]

    @functools.cached_property
    def _blocks(self) -> Tensor:
        """The block of each entry of `order`."""
        numbers = torch.arange(len(self.sizes), device=self.sizes.device)
        return numbers.repeat_interleave(self.sizes, output_size=len(self.order))

    @functools.cached_property
    def _rows(self) -> Tensor:
        """The row of each entry of `order`."""
        number = torch.arange(len(self.order), device=self.order.device)
        return self._blocks * self.block + number - self.starts[self._blocks] if self.filled else number

    def _spread(self, values: Tensor) -> Tensor:
        found = torch.full((self.tokens,), -1, dtype=torch.int32, device=values.device)
        return found.index_copy_(0, self.order.long(), values.to(torch.int32))

    def gather(self, tensor: Tensor, *, means: bool = False) -> tuple[Tensor, Tensor | None]:
        """Bring tokens together.

        Args:
            tensor: [B, H, S, D].

        Returns:
            ([B, H, rows, D]; the means of blocks [B, H, n, D], float64 of float64, else float32, or None).
        """
        ops = kernels_for(tensor)
        if ops is not None:
            rows, found = _Gather.apply(tensor, self, means, ops)  # type: ignore[no-untyped-call]
            return rows, found if means else None
        rows = tensor.index_select(2, self.order)
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        mean = None
        if means:
            total = rows.new_zeros(*rows.shape[:2], len(self.sizes), rows.shape[3], dtype=wide)
            mean = total.index_add(2, self._blocks, rows.to(wide)) / self.sizes[:, None]
        if self.filled:
            made = rows.new_zeros(*rows.shape[:2], len(self.sizes) * self.block, rows.shape[3])
            rows = made.index_copy(2, self._rows, rows)
        return rows, mean

    def scatter(self, rows: Tensor, *, gate: Tensor | None = None, coarse: Tensor | None = None) -> Tensor:
        """Bring rows back to their tokens, and add what is one row for a block.

        Args:
            rows: [B, H, rows, D], as of `gather`. coarse: [B, H, n, D]. gate: [B|1, H|1, S|1, D|1], its weight. Both
                or none.

        Returns:
            [B, H, S, D]; tokens that are in no block are 0.
        """
        shape = (*rows.shape[:2], self.tokens, rows.shape[3])
        gate = None if gate is None else gate.expand(shape)
        ops = kernels_for(rows)
        if ops is not None:
            out: Tensor = _Scatter.apply(rows, gate, coarse, self, ops).transpose(1, 2)  # type: ignore[no-untyped-call]
            return out
        there = (self.places >= 0)[:, None]
        out = rows.index_select(2, self.places.clamp(min=0)).masked_fill(~there, 0)
        if gate is None or coarse is None:
            return out
        added = coarse.index_select(2, self.owners) * gate
        return out + added.masked_fill(~there, 0).to(out.dtype)


def scored(query: Tensor, key: Tensor, value: Tensor | None, scale: float, group: int) -> tuple[Tensor, Tensor | None]:
    """Attention of the means of blocks, with its scores.

    Args:
        query: [B, H_q, n, D]; key: [B, H_kv, m, D]; value: [B, H_kv, m, D_v] or None, float32 or float64.
        group: H_q / H_kv.

    Returns:
        (scores [B, H_q, n, m], out [B, H_q, n, D_v] or None).
    """
    given = [t for t in (query, key, value) if t is not None]
    ops = None if wants_grad(*given) else kernels_for(query)
    if ops is not None and query.dtype == torch.float32:
        return ops.scored(query, key, value, scale)
    scores = scale * (query @ key.repeat_interleave(group, 1).mT)
    return scores, None if value is None else scores.softmax(-1) @ value.repeat_interleave(group, 1)


def best(scores: Tensor, kept: int) -> Tensor:
    """Choose the highest scores.

    Args:
        scores: [..., m]. kept: how many, at most m.

    Returns:
        int32 [..., kept], where they are, ascending.
    """
    scores = scores.detach()
    ops = kernels_for(scores)
    found = None if ops is None or scores.dtype != torch.float32 else ops.top(scores, kept)
    return scores.topk(kept, dim=-1).indices.sort(-1).values.to(torch.int32) if found is None else found


def pooled(tensor: Tensor, block: int) -> Tensor:
    """Take the mean of each block of tokens, of which the last may hold fewer.

    Args:
        tensor: [B, H, S, D]. block: tokens of a block.

    Returns:
        [B, H, blocks, D], float64 of float64, else float32.
    """
    ops = None if wants_grad(tensor) else kernels_for(tensor)
    found = None if ops is None else ops.pooled(tensor, block)
    if found is not None:
        return found
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    B, H, S, D = tensor.shape
    blocks = -(-S // block)
    rows = torch.nn.functional.pad(wide, (0, 0, 0, blocks * block - S)).view(B, H, blocks, block, D)
    sizes = (S - torch.arange(blocks, device=tensor.device) * block).clamp(max=block)
    means: Tensor = rows.sum(3) / sizes[:, None]
    return means


def check_beside(method: str, name: str, learned: Tensor, values: Tensor) -> None:
    """Check that what a model learned lies where the values of the call are.

    Raises:
        InvalidInputError: it lies on another device.
    """
    if not has_shapes_only(values) and learned.device != values.device:
        raise InvalidInputError(
            f"{method}: {name} is on {learned.device}, the values on {values.device}; move them together"
        )


def wants_grad(*tensors: Tensor | None) -> bool:
    """Tell whether what is computed of tensors now is differentiated."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def kernels_for(tensor: Tensor) -> BlockOps | None:
    """Find kernels for a tensor: there are none for what has no contents, nor for float64."""
    return None if has_shapes_only(tensor) else kernels_on(tensor.device, tensor.dtype)


def kernels_on(device: torch.device, dtype: torch.dtype) -> BlockOps | None:
    """Find kernels for tensors like those, whether or not they have contents."""
    return None if dtype == torch.float64 else block_ops(device.type)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, blocks: Blocks, means: bool, ops: BlockOps) -> Any:
        ctx.blocks, ctx.ops = blocks, ops
        lists = (blocks.order, blocks.starts, blocks.sizes)
        rows, found = ops.gather(tensor, lists, blocks.block, filled=blocks.filled, means=means)
        ctx.set_materialize_grads(False)
        return rows, rows.new_empty(0) if found is None else found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, rows: Tensor | None, means: Tensor | None) -> Any:
        blocks = ctx.blocks
        if rows is None:
            assert means is not None
            width = len(blocks.sizes) * blocks.block if blocks.filled else len(blocks.order)
            rows = means.new_zeros(*means.shape[:2], width, means.shape[3])
        more = {}
        if means is not None:
            shape = (*rows.shape[:2], blocks.tokens, rows.shape[3])
            more = {"gate": blocks.shares.expand(shape), "coarse": means.contiguous(), "owners": blocks.owners}
        return ctx.ops.scatter(rows.contiguous(), blocks.places, **more).transpose(1, 2), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, gate: Tensor | None, coarse: Tensor | None, blocks: Blocks, ops: BlockOps
    ) -> Tensor:
        ctx.blocks, ctx.ops = blocks, ops
        more = {}
        if gate is not None and coarse is not None:
            ctx.save_for_backward(gate, coarse)
            more = {"gate": gate, "coarse": coarse.contiguous(), "owners": blocks.owners}
        return ops.scatter(rows.contiguous(), blocks.places, **more)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        blocks, ops, grad = ctx.blocks, ctx.ops, grad.transpose(1, 2)
        lists = (blocks.order, blocks.starts, blocks.sizes)
        rows, _ = ops.gather(grad, lists, blocks.block, filled=blocks.filled, means=False)
        if not ctx.saved_tensors:
            return rows, None, None, None, None
        gate, coarse = ctx.saved_tensors
        there = (blocks.places >= 0)[:, None]
        of_gate = of_coarse = None
        if ctx.needs_input_grad[1]:
            of_gate = (grad * coarse.index_select(2, blocks.owners)).masked_fill(~there, 0).to(gate.dtype)
        if ctx.needs_input_grad[2]:
            _, found = ops.gather(grad * gate, lists, blocks.block, filled=blocks.filled, means=True)
            of_coarse = (found * blocks.sizes[:, None]).to(coarse.dtype)
        return rows, of_gate, of_coarse, None, None
