"""Family `block_sparse`: each block of queries sees a list of key blocks. Softmax attention under a mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...semantics.block_maps import visible_keys
from ..cases import Case
from .base import Call, Family, Part, Shapes, along

if TYPE_CHECKING:
    from ..problems import Maker

__all__ = ["BlockSparse"]

_NOWHERE = (2**31 - 1, -(2**31))
"""What stands behind the end of a list."""


class BlockSparse(Family):
    family = "block_sparse"
    # A few blocks of 64 and 128, whole ones and the rest of one: the lists make the cases, and interpreters are slow.
    lengths: ClassVar[Shapes] = {
        "equal": (((192, 192),), ((100, 100),), ((130, 130),)),
        "one": (((1, 130),), ((1, 64),), ((1, 70),)),
        "fewer": (((64, 200),), ((7, 70),), ((100, 192),)),
        "more": (((130, 70),), ((100, 64),), ((192, 130),)),
    }
    long: ClassVar[Shapes] = {
        "equal": (((257, 257),), ((600, 600),), ((1100, 1100),), ((513, 513),)),
        "one": (((1, 1100),), ((1, 257),)),
        "fewer": (((129, 1100),), ((33, 600),)),
        "more": (((600, 129),), ((1100, 257),)),
    }
    batched = True
    unmade: ClassVar[Mapping[str, tuple[Any, ...]]] = {"alibi": (True,), "segments": ("shared", "pair")}

    def axes(self, axes: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        # Without a map there is nothing to do: a row that says so takes no such case.
        shapes = tuple(shape for shape in axes["block_shape"] if shape != (0, 0))
        return {**super().axes(axes), "block_map": (True,), "block_shape": shapes}

    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        r, B, (s_q, s_k) = case.request, len(case.lengths), case.longest
        tensors: dict[str, Tensor | None] = {n: maker.input(n, *shape) for n, shape in self.shapes(case).items()}
        block_q, block_k = r.block_shape
        query_blocks, key_blocks = -(-s_q // block_q), -(-s_k // block_k) + (2 if r.block_starts else 0)
        # Maps of their own for samples and heads, or one for all.
        alone = maker.uniform(2) < 0.6
        shape = (B if alone[0] else 1, r.heads if alone[1] else 1, query_blocks)
        counts = (maker.uniform(*shape) * (key_blocks + 1)).to(torch.int32)
        order = maker.uniform(*shape, key_blocks).argsort(-1).to(torch.int32)
        behind = torch.arange(key_blocks) >= counts[..., None]
        nowhere = torch.tensor(_NOWHERE, dtype=torch.int32)[(maker.uniform(*order.shape) * 2).long()]
        extra: dict[str, Any] = {
            "block_counts": counts.to(maker.device),
            "block_indices": torch.where(behind, nowhere, order).to(maker.device),
        }
        if r.block_starts:
            extra |= _packed(maker, (B if alone[0] else 1, r.kv_heads if alone[1] else 1), key_blocks, block_k, s_k)
        elif r.block_sizes:
            # None of a block, some, all; and in the last one as many as there are, or fewer.
            sizes = (maker.uniform(key_blocks) * 1.5 * (block_k + 1)).clamp(max=block_k).to(torch.int32)
            extra["block_valid"] = sizes.to(maker.device)
        return tensors, extra

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        r, B, (s_q, s_k) = case.request, len(case.lengths), case.longest
        return {
            "query": (B, r.heads, s_q, r.head_dim),
            "key": (B, r.kv_heads, s_k, r.head_dim),
            "value": (B, r.kv_heads, s_k, r.dims[1]),
        }

    def places(self, case: Case) -> Tensor:
        return along(case.longest[1])[:, None]

    def out_shape(self, case: Case) -> tuple[int, ...]:
        r = case.request
        return (len(case.lengths), r.heads, case.longest[0], r.dims[1])

    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        mask = visible_keys(case.request.block_shape, *case.longest, group=case.request.group, **extra)
        yield tensors["query"], tensors["key"], tensors["value"], mask.expand(*self.out_shape(case)[:2], -1, -1)

    def join(self, case: Case, outs: Sequence[Tensor], seconds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return outs[0], seconds[0]

    def first(self, call: Call) -> tuple[Call, int]:
        case = dataclasses.replace(call.case, lengths=call.case.lengths[:1])
        extra = {name: t if t.dim() == 1 else t[:1] for name, t in call.extra.items()}
        return Call(case, {name: t[:1] for name, t in call.tensors.items()}, extra), 1


def _packed(maker: Maker, shape: tuple[int, int], blocks: int, block_k: int, s_k: int) -> dict[str, Tensor]:
    """Blocks of unequal sizes anywhere among the keys, in any order, with gaps between them; some have no keys."""
    sizes = (maker.uniform(*shape, blocks) * 1.4 * (block_k + 1)).clamp(max=block_k).long()
    gaps = (maker.uniform(*shape, blocks) * 3).long()
    starts = (sizes + gaps).cumsum(-1) - sizes
    sizes = torch.minimum(sizes, (s_k - starts).clamp(min=0))
    order = maker.uniform(*shape, blocks).argsort(-1)
    found = {"block_valid": sizes, "block_starts": starts.clamp(max=s_k)}
    return {name: t.gather(-1, order).to(torch.int32).to(maker.device) for name, t in found.items()}
