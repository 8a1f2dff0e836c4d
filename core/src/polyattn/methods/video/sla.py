"""`sla_attn` and `sage_sla_attn`: exact attention to the key blocks that matter, linear attention to the rest (SLA).

The sequence is cut into blocks as it is, whatever the grid. Means of blocks say which key blocks a block of queries
attends to exactly. What a learned matrix makes of the linear branch is added to that (arXiv 2509.24006).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...contract import Inner, Like, Place
from ...errors import ConfigError, InvalidInputError
from ...semantics.block_maps import visible_keys
from ...semantics.validation import has_shapes_only
from .rows import best, check_beside, kernels_for, pooled, scored, wants_grad

__all__ = ["SLA", "SageSLA", "eight_bits", "feature_maps", "sla_reference", "top_blocks"]

WEIGHT, BIAS = "proj_l.weight", "proj_l.bias"
_EPSILON = 1e-5
"""Added to the denominator of the linear branch, as in the code that published weights were trained with."""

feature_maps: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "elu": lambda x: torch.nn.functional.elu(x) + 1,
    "relu": torch.relu,
}
"""The maps of queries and keys in the linear branch, by name. [..., D] -> [..., D]."""


class _Plan(NamedTuple):
    kept: int
    """Key blocks that each block of queries attends to."""
    counts: Tensor
    share: float
    """Of the key blocks, how many these are."""


class SLA:
    """`SLA` adds a linear branch to exact attention over chosen blocks: a `polyattn.contract.Method`.

    `place.tensors` holds what the model learned: "proj_l.weight" [D_v, D_v], and "proj_l.bias" [D_v] where it has one.

    Args:
        topk_ratio: share of the key blocks that are attended to exactly, above 0; at least one block is.
        feature_map: softmax, elu (that is elu + 1) or relu. linear_scope: all = the linear branch sees every key;
            complement = those that the exact branch left out.
        BLKQ, BLKK: tokens of a block of queries and of keys.

    Raises:
        ConfigError: topk_ratio is 0.
    """

    name: ClassVar[str] = "sla_attn"
    reads: ClassVar[tuple[str, ...]] = (WEIGHT, BIAS)
    plans_by_step = False

    def __init__(self, *, topk_ratio: float, feature_map: str, linear_scope: str, BLKQ: int, BLKK: int) -> None:
        if topk_ratio <= 0:
            raise ConfigError(
                f"{self.name}: topk_ratio={topk_ratio} keeps no key block; give a share above 0, up to 1 (all of them)"
            )
        self.ratio, self.blocks = topk_ratio, (BLKQ, BLKK)
        self.feature_map, self.complement = feature_map, linear_scope == "complement"
        self.map = feature_maps[feature_map]

    def leaves_dense(self, place: Place) -> str:
        return ""

    def plan(self, place: Place, like: Like) -> _Plan:
        """
        Raises:
            InvalidInputError: some of the text is padding.
        """
        if place.valid_text not in (None, place.text):
            raise InvalidInputError(
                f"{self.name}: valid_text={place.valid_text} of text={place.text} leaves padding, which would take "
                "part in the means of its blocks; cut the padding off, and leave valid_text out"
            )
        rows, keys = (-(-like.tokens // block) for block in self.blocks)
        kept = max(1, min(keys, int(self.ratio * keys)))
        counts = torch.full((1, 1, rows), kept, dtype=torch.int32, device=like.device)
        return _Plan(kept, counts, kept / keys)

    def density(self, plan: _Plan, place: Place) -> float:
        return plan.share

    def attend(
        self,
        plan: _Plan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        place: Place,
        kept: dict[str, Any],
        inner: Inner,
    ) -> Tensor:
        weight, bias = self._learned(place, value)
        with torch.no_grad():
            chosen = top_blocks(query, key, self.blocks, plan.kept)
            counts = plan.counts.expand(chosen.shape[:3])
        exact = self._exact(query, key, value, inner, (counts, chosen))
        ops = None if self.complement or wants_grad(query, key, value, weight, bias) else kernels_for(query)
        if ops is not None:
            # phi(Q) (state W^T) is (phi(Q) state) W^T: one product less for each token.
            state, total = ops.linear_sums(key, value, self.feature_map)
            state = state @ weight.float().mT
            return ops.linear_add(query, state, total, bias, exact.to(query.dtype), self.feature_map, _EPSILON)
        left_out = None
        if self.complement:
            keys = -(-key.shape[2] // self.blocks[1])
            left_out = torch.ones(*chosen.shape[:3], keys, device=query.device).scatter(-1, chosen.long(), 0.0)
        linear = _linear(self.map(_wide(query)), self.map(_wide(key)), _wide(value), self.blocks, left_out)
        projected = torch.nn.functional.linear(linear, weight.to(linear.dtype), _as(bias, linear))
        return (exact + projected).to(query.dtype)

    def _exact(self, query: Tensor, key: Tensor, value: Tensor, inner: Inner, lists: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = inner.block_sparse(query, key, value, lists=lists, block_shape=self.blocks)
        return out

    def _learned(self, place: Place, value: Tensor) -> tuple[Tensor, Tensor | None]:
        weight, bias, width = place.tensors.get(WEIGHT), place.tensors.get(BIAS), value.shape[-1]
        if weight is None:
            raise InvalidInputError(
                f"{self.name} adds its linear branch through a matrix that the model learned, and the place has none: "
                f'Place(tensors={{"{WEIGHT}": ..., "{BIAS}": ...}}). Zeros leave the exact branch alone'
            )
        for name, tensor, shape in ((WEIGHT, weight, (width, width)), (BIAS, bias, (width,))):
            if tensor is not None and (not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape):
                found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InvalidInputError(
                    f"{self.name}: {name} is {found}; a tensor {list(shape)} is needed, D_v={width} being the last "
                    "axis of the values"
                )
            if tensor is not None:
                check_beside(self.name, name, tensor, value)
        if has_shapes_only(value):  # nothing is computed, and what was learned may be elsewhere
            return value.new_empty(width, width), None
        return weight, bias


class SageSLA(SLA):
    """`SageSLA` emulates the published kernels, whose scores are products of 8-bit integers. Forward only.

    Queries and keys, the mean of the keys taken away, are rounded to 8 bits with one scale for each block of a head.
    What the integers stand for goes through exact attention in float32, so it has their error and not their speed.
    """

    name = "sage_sla_attn"

    def _exact(self, query: Tensor, key: Tensor, value: Tensor, inner: Inner, lists: tuple[Tensor, Tensor]) -> Tensor:
        # A constant in all keys shifts all scores of a query alike, so softmax does not see that it is gone.
        centred = _wide(key) - _wide(key).mean(2, keepdim=True)
        query, key = eight_bits(_wide(query), self.blocks[0]), eight_bits(centred, self.blocks[1])
        return super()._exact(query, key, _wide(value), inner, lists)


def eight_bits(tensor: Tensor, block: int) -> Tensor:
    """Round the numbers of each block of tokens to 255 steps between its largest magnitude and the negative of that.

    Args:
        tensor: [B, H, S, D]. block: tokens of a block.
    """
    rows = _blocks(tensor, block)
    scale = (rows.abs().amax((-2, -1), keepdim=True) / 127).clamp(min=1e-12)
    return ((rows / scale).round().clamp(-127, 127) * scale).flatten(2, 3)[:, :, : tensor.shape[2]]


def top_blocks(query: Tensor, key: Tensor, blocks: tuple[int, int], kept: int) -> Tensor:
    """Choose the key blocks of each block of queries by the products of their means.

    Args:
        query: [B, H_q, S, D]; key: [B, H_kv, S, D]. blocks: (BLKQ, BLKK). kept: how many, at most all.

    Returns:
        int32 [B, H_q, nQ, kept], the numbers of the blocks, ascending.
    """
    rows, keys = pooled(query, blocks[0]), pooled(key, blocks[1])
    # Without what all keys share the products are smaller, and so are their rounding errors. The order stays.
    keys = keys - keys.mean(2, keepdim=True)
    return best(scored(rows, keys, None, 1.0, query.shape[1] // key.shape[1])[0], kept)


def _linear(query: Tensor, key: Tensor, value: Tensor, blocks: tuple[int, int], weights: Tensor | None) -> Tensor:
    """Compute the linear branch, phi(Q) (sum phi(K)^T V) / phi(Q) (sum phi(K)).

    Args:
        query: [B, H_q, S, D]; key: [B, H_kv, S, D], both mapped; value: [B, H_kv, S, D_v].
        weights: [B, H_q, nQ, nK], 1 = the queries of the block see the keys of the block; None = all keys.

    Returns:
        [B, H_q, S, D_v]; 0 for queries that see no key.
    """
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    # One column more: the sum of the keys is that of their products with ones.
    value = torch.nn.functional.pad(value, (0, 1), value=1.0)
    if weights is None:
        both = query @ (key.mT @ value).repeat_interleave(group, 1)
    else:
        sums = _blocks(key, blocks[1]).mT @ _blocks(value, blocks[1])  # [B, H_kv, nK, D, D_v + 1]
        wide, high = sums.shape[-2:]
        seen = weights.to(query.dtype) @ sums.flatten(-2).repeat_interleave(group, 1)
        sums = seen.view(*seen.shape[:-1], wide, high)
        both = (_blocks(query, blocks[0]) @ sums).flatten(2, 3)[:, :, :tokens]
    return both[..., :-1] / (both[..., -1:] + _EPSILON)


def sla_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Tensor,
    blocks: tuple[int, int],
    tensors: Mapping[str, Tensor],
    *,
    feature_map: str,
    linear_scope: str,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Compute SLA of given blocks as it is defined: two masks over all pairs of tokens, in float64 or another `dtype`.

    Args:
        query: [B, H_q, S, D]; key: [B, H_kv, S, D]; value: [B, H_kv, S, D_v].
        chosen: int32 [B, H_q, nQ, kept], of `top_blocks`. blocks: (BLKQ, BLKK).
        tensors: as `SLA`. feature_map, linear_scope: as `SLA`.

    Returns:
        out [B, H_q, S, D_v]. Rows of the linear branch that see no key are 0.
    """
    q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
    group, tokens = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    counts = torch.full(chosen.shape[:3], chosen.shape[3], dtype=torch.int32, device=chosen.device)
    mask = visible_keys(blocks, tokens, tokens, counts, chosen.to(torch.int32))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    exact = scores.softmax(-1) @ v
    phi = feature_maps[feature_map]
    weights = phi(q) @ phi(k).mT
    if linear_scope == "complement":
        weights = weights * ~mask
    linear = weights @ v / (weights.sum(-1, keepdim=True) + _EPSILON)
    bias = tensors.get(BIAS)
    out: Tensor = exact + torch.nn.functional.linear(linear, tensors[WEIGHT].to(dtype), _as(bias, linear))
    return out


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _as(tensor: Tensor | None, other: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(other.dtype)


def _blocks(tensor: Tensor, block: int) -> Tensor:
    """Cut tokens into blocks and fill up the last with zeros: [B, H, S, D] -> [B, H, blocks, block, D]."""
    lacking = -tensor.shape[2] % block
    B, H, S, width = tensor.shape
    return torch.nn.functional.pad(tensor, (0, 0, 0, lacking)).view(B, H, (S + lacking) // block, block, width)
