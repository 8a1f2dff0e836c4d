"""The indexer of DeepSeek sparse attention: which tokens each query is shown (DeepSeek-V3.2-Exp, arXiv 2512.02556,
section 2.1).

Of token t with index queries q[t, j], weights w[t, j] and index keys k[s], the score of token s <= t is

    I[t, s] = sum_j w[t, j] * relu(q[t, j] . k[s])

in float32, and the query sees the `topk` tokens of the highest scores. Equal scores have no order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidInputError

__all__ = ["INDEX_BYTES", "hadamard", "index_scores", "pack_index", "round_index", "top_tokens", "unpack_index"]

INDEX_BYTES = 4
"""Of a row of FP8 beside its numbers: its scale, a float32."""


def index_scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Score tokens for queries.

    Args:
        query: [..., T, H_i, D_i]. keys: [..., S, D_i]. weights: [..., T, H_i], all factors of the scores in them.

    Returns:
        float32 [..., T, S], float64 where the query is.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, found = keys.to(wide).transpose(-1, -2), None
    for j in range(query.shape[-2]):
        # Head by head: all at once they are H_i times as much memory.
        part = (query[..., j, :].to(wide) @ keys).relu_().mul_(weights[..., j, None].to(wide))
        found = part if found is None else found.add_(part)
    return found if found is not None else query.new_zeros(*query.shape[:-2], keys.shape[-1], dtype=wide)


def top_tokens(scores: Tensor, seen: Tensor, topk: int) -> Tensor:
    """List the tokens of the highest scores.

    Args:
        scores: [..., S]. seen: int [...], tokens that each query sees, the first of S.

    Returns:
        int32 [..., topk], in any order; -1 where a query sees fewer tokens.
    """
    places = torch.arange(scores.shape[-1], device=scores.device)
    hidden = places >= seen[..., None]
    # A score that is no number is a token's like any other, and below all of them.
    finite = scores.nan_to_num(nan=torch.finfo(scores.dtype).min, neginf=torch.finfo(scores.dtype).min)
    best = finite.masked_fill(hidden, -torch.inf).topk(min(topk, scores.shape[-1]), -1, sorted=False)
    found = best.indices.to(torch.int32).masked_fill_(best.values.isneginf(), -1)
    return torch.nn.functional.pad(found, (0, topk - found.shape[-1]), value=-1)


def hadamard(rows: Tensor) -> Tensor:
    """Rotate rows [..., D] by the normalised Hadamard matrix; D is a power of two. It changes no product of two rotated
    rows, and spreads what is large over all numbers of a row before it is rounded to 8 bits.

    Raises:
        InvalidInputError: D is no power of two.
    """
    size, width = rows.shape[-1], 1
    if size & (size - 1) or not size:
        raise InvalidInputError(
            f"rows of {size} numbers; a Hadamard matrix of powers of two alone is here: 64, 128, ..."
        )
    found = rows.to(torch.promote_types(rows.dtype, torch.float32))
    # Sum and difference in one operation: a device spends more time on starting these than on the numbers of a step.
    signs = torch.arange(1, -2, -2, dtype=found.dtype, device=found.device)[:, None]
    while width < size:
        a, b = torch.split(torch.unflatten(found, -1, (-1, 2, width)), 1, -2)
        found = torch.addcmul(a, b, signs).flatten(-3)
        width *= 2
    return torch.mul(found, size**-0.5).to(rows.dtype)


def pack_index(rows: Tensor) -> Tensor:
    """Round rows [..., D] to float8_e4m3fn with a scale each that is a power of two (ue8m0): uint8 [..., D + 4]."""
    numbers, scale = _scaled(rows)
    return torch.cat([numbers.view(torch.uint8), scale.view(torch.uint8)], -1)


def round_index(rows: Tensor) -> Tensor:
    """Round rows [..., D] as `pack_index` does: what `unpack_index` makes of its result, in the rows' dtype."""
    numbers, scale = _scaled(rows)
    return torch.mul(numbers.float(), scale).to(rows.dtype)


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float8_e4m3fn, over their scales, float32 [..., 1]."""
    wide = rows.float()
    # Of a row of zeros the scale says nothing.
    scale = torch.exp2(torch.ceil(torch.log2(wide.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448.0)))
    return (wide / scale).to(torch.float8_e4m3fn), scale


def unpack_index(packed: Tensor) -> Tensor:
    """Return the numbers of `pack_index`, float32 [..., D]."""
    numbers, scale = packed[..., :-INDEX_BYTES].contiguous(), packed[..., -INDEX_BYTES:].contiguous()
    return torch.mul(numbers.view(torch.float8_e4m3fn).float(), scale.view(torch.float32))
