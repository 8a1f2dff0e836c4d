"""Families `dense` and `varlen` by npu_fusion_attention, the operator of training (op-plugin 7, torch-npu 2.11).

From its documents and source: scale defaults to 1; a mask's True hides; key and value have one shape but for the
width; the LSE is softmax_max + log(softmax_sum), each eight times in its last axis; packed lengths are running sums
without the 0, as numbers of the host. Its backward is an operator of its own, which reads maximum, sum and output as it
is given them: with the LSE for the maximum and 1 for the sum, they may be those of a merged result.

What a row without keys gives is left open there: no such row is ever computed, or its results are replaced (S7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.adapters import align16, empty_result, load, with_positive_scale
from polyattn.contract import AttentionRequest, Bound
from polyattn.semantics.masks import combined_mask, open_empty_rows

from .records.common import TORCH_NPU
from .sparsity import WHOLE, Sparsity, blind_rows, by_position

__all__ = ["FusionAttention"]

_COPIES = 8
"""Of each statistic."""
_NO_WEIGHT = 1e30
"""The LSE of a row without keys in the backward: the weights exp(score - LSE) are 0."""
_ROWS_MAY_BE_EMPTY = 2
"""inner_precise: repair rows that the mask hides wholly."""


class FusionAttention:
    """Binds dense and packed requests."""

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed version lacks what the request needs.
        """
        return with_positive_scale(request, lambda positive: _Fusion(positive).bound())


class _Shape(NamedTuple):
    """What forward and backward are told alike, and what is known of rows that see nothing.

    Attributes:
        lens: actual_seq_qlen and actual_seq_kvlen of packed sequences.
        alive: bool, broadcastable to an output, False for rows without keys; None = every row has keys.
    """

    rule: Sparsity
    lens: dict[str, list[int]]
    alive: Tensor | None


class _Fusion:
    """A request, and the operators that serve it."""

    def __init__(self, request: AttentionRequest) -> None:
        r = self.request = request
        self.packed = r.family == "varlen"
        self.layout = "TND" if self.packed else "BNSD" if r.layout == "BHSD" else "BSND"
        self.with_lse = (r.lse or bool(r.grad)) and not r.dropout
        # Else statistics of packed sequences come heads first, in the shape of tokens first.
        self.order = {"softmax_layout": "TND"} if self.packed and self.with_lse else {}
        needs = dict.fromkeys(self.order, "the LSE of packed sequences")
        self.operator = load(TORCH_NPU, "torch_npu:npu_fusion_attention", needs)
        self.gradient: Callable[..., Any] | None = None
        if r.grad and not r.dropout:
            self.gradient = load(TORCH_NPU, "torch_npu:npu_fusion_attention_grad", needs)
        self.scale = r.softmax_scale

    def bound(self) -> Bound:
        return Bound(self.forward, self.backward if self.gradient else None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        sinks: None = None,
        out: Tensor | None = None,
        **where: Any,
    ) -> Any:
        """`polyattn.contract.DenseForward` or `VarlenForward`."""
        if self.packed and not (query.shape[0] and key.shape[0]):
            return empty_result(self.request, query, out)
        shape = self._shape(query, key, attn_mask, **where)
        result, top, total, *_ = self.operator(
            *map(_held, (query, key, value)),
            head_num=self.request.heads,
            input_layout=self.layout,
            scale=self.scale,
            keep_prob=1.0 - self.request.dropout,
            **self._rule(shape),
            **self.order,
        )
        if shape.alive is not None:
            result = result.masked_fill(~shape.alive, 0.0)
        result = result if out is None else out.copy_(result)
        if not self.with_lse:
            return result
        lse = top[..., 0] + total[..., 0].log()
        if self.layout == "BSND":
            lse = lse.transpose(1, 2)
        return result, lse if shape.alive is None else lse.masked_fill(~shape.alive[..., 0], -torch.inf)

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        attn_mask: Tensor | None = None,
        **where: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`polyattn.contract.DenseBackward` or `VarlenBackward`, from the (out, lse) that it is given."""
        assert self.gradient is not None
        shape = self._shape(query, key, attn_mask, **where)
        top = lse.masked_fill(lse == -torch.inf, _NO_WEIGHT)
        if self.layout == "BSND":
            top = top.transpose(1, 2)
        top = top[..., None].expand(*top.shape, _COPIES).contiguous()
        dq, dk, dv, *_ = self.gradient(
            *map(_held, (query, key, value, dout)),
            head_num=self.request.heads,
            input_layout=self.layout,
            softmax_max=top,
            softmax_sum=torch.ones_like(top),
            attention_in=_held(out),
            scale_value=self.scale,
            **self._rule(shape),
            **self.order,
        )
        return dq, dk, dv

    def _rule(self, shape: _Shape) -> dict[str, Any]:
        rule = shape.rule
        if rule.mask is None:
            return dict(shape.lens)
        precise = {} if shape.alive is None or rule.mode == WHOLE else {"inner_precise": _ROWS_MAY_BE_EMPTY}
        return {
            "atten_mask": rule.mask,
            "sparse_mode": rule.mode,
            "pre_tockens": rule.before,
            "next_tockens": rule.after,
            **precise,
            **shape.lens,
        }

    def _shape(self, query: Tensor, key: Tensor, attn_mask: Tensor | None, **where: Any) -> _Shape:
        if self.packed:
            return self._packed(query, **where)
        axis = 2 if self.layout == "BNSD" else 1
        s_q, s_k = query.shape[axis], key.shape[axis]
        rule = None if attn_mask is not None else by_position(self.request, query.device)
        if rule is None:
            return self._whole(query, attn_mask, s_q, s_k)
        blind = blind_rows(self.request, s_q, s_k)
        alive = torch.arange(s_q, device=query.device) >= blind if blind else None
        return _Shape(rule, {}, alive if alive is None else alive.view(-1, *[1] * (3 - axis)))

    def _whole(self, query: Tensor, attn_mask: Tensor | None, s_q: int, s_k: int) -> _Shape:
        """Mask and positions as one mask. Rows that it would hide wholly see everything, and are dropped afterwards."""
        seen = combined_mask(self.request, attn_mask, s_q, s_k, query.device)
        seen = seen.view(*[1] * (4 - seen.ndim), *seen.shape)
        if seen.shape[1] > 1 and seen.shape[0] != query.shape[0]:
            # Shapes it knows: [B, N, S_q, S_k], [B, 1, S_q, S_k], [1, 1, S_q, S_k].
            seen = seen.expand(query.shape[0], -1, -1, -1)
        seen, alive = open_empty_rows(seen)
        alive = alive if self.layout == "BNSD" else alive.transpose(1, 2)
        return _Shape(Sparsity(WHOLE, (~seen).contiguous()), {}, alive)

    def _packed(
        self, query: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
    ) -> _Shape:
        ends = torch.stack([cu_seqlens_q, cu_seqlens_k])[:, 1:].tolist()
        rule = by_position(self.request, query.device)
        assert rule is not None, "no row takes a window along the upper left diagonal"
        blind: list[int] = []
        start, first = 0, 0
        for end, last in zip(*ends, strict=True):
            blind += range(start, start + blind_rows(self.request, end - start, last - first))
            start, first = end, last
        alive = None
        if blind:
            alive = torch.ones(query.shape[0], dtype=torch.bool)
            alive[blind] = False
            alive = alive.to(query.device, non_blocking=True)[:, None, None]
        return _Shape(rule, dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), ends, strict=True)), alive)


def _held(tensor: Tensor) -> Tensor:
    """As the operators want tensors: contiguous, on a boundary."""
    return align16(tensor.contiguous())
