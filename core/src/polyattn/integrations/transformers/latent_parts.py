"""This module computes what a DeepSeek-shaped attention module computes before attention: query parts and latent rows.

The parts are found by their attributes, as in DeepSeek-V2 and V3: queries by `q_proj`, or `q_a_proj`, `q_a_layernorm`
and `q_b_proj`; rows by `kv_a_proj_with_mqa` and `kv_a_layernorm`. How positions are turned differs between models and
has no attribute: `RULES` has the ways there are, and `latent_check` finds out which one a module uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...serving.mla.lists import Index

__all__ = ["RULES", "Parts", "compute_index", "compute_parts", "heads_of", "rules_for"]

Rule = Callable[[Tensor, Any], Tensor]


class Parts(NamedTuple):
    """The parts of a call: q_nope [T, H, D_nope] and q_pe [T, H, D_r]; rows [T, D_c + D_r]; T = B * S tokens in
    order."""

    q_nope: Tensor
    q_pe: Tensor
    rows: Tensor


def _halves(x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (t.unsqueeze(-2) for t in positions)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _pairs_to_halves(x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (t[..., : t.shape[-1] // 2].unsqueeze(-2) for t in positions)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def _complex_pairs(x: Tensor, positions: Tensor) -> Tensor:
    # In float32 whatever the dtype, as the models do.
    turned = torch.view_as_complex(torch.unflatten(x.float(), -1, (-1, 2)).contiguous()) * positions.unsqueeze(-2)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


RULES: dict[str, Rule] = {"halves": _halves, "pairs_to_halves": _pairs_to_halves, "complex_pairs": _complex_pairs}
"""Rotations of x [B, S, H|1, D_r], by name.

- halves: i turns with i + D_r / 2 (`rope_interleave=False`). pairs_to_halves: 2i turns with 2i + 1, the results apart
  (`rope_interleave=True`). Both take cos and sin [B|1, S, D_r].
- complex_pairs: 2i turns with 2i + 1, in place (DeepSeek-V2). It takes complex numbers [B|1, S, D_r / 2].
"""


def rules_for(positions: Any) -> tuple[str, ...]:
    """List the rules that take such position embeddings."""
    if isinstance(positions, Tensor) and positions.is_complex():
        return ("complex_pairs",)
    pair = isinstance(positions, (tuple, list)) and len(positions) == 2
    return ("halves", "pairs_to_halves") if pair else ()


def heads_of(module: Any) -> int:
    """Count the heads of this rank."""
    each: int = module.qk_nope_head_dim + module.v_head_dim
    rows: int = module.kv_b_proj.weight.shape[0]
    return rows // each


def compute_index(module: Any, hidden: Tensor, positions: Any, rule: str) -> Index:
    """Compute what the indexer of a module makes of hidden states [B, S, hidden], for T = B * S tokens."""
    indexer, turn = module.indexer, RULES[rule]
    query = indexer.wq_b(module.q_a_layernorm(module.q_a_proj(hidden)))
    query = torch.unflatten(query, -1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(-2)
    turned = []
    for rows in (query, key):
        first, rest = rows.split([indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim], -1)
        turned.append(torch.cat([turn(first, positions), rest], -1))
    factor = indexer.n_heads**-0.5 * indexer.softmax_scale
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float() * factor
    query, key = turned
    return Index(query.flatten(0, 1), key.squeeze(-2).flatten(0, 1), weights.flatten(0, 1))


def compute_parts(module: Any, hidden: Tensor, positions: Any, rule: str) -> Parts:
    """Compute the parts for hidden states [B, S, hidden]."""
    if getattr(module, "q_proj", None) is not None:
        query = module.q_proj(hidden)
    else:
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))
    query = torch.unflatten(query, -1, (-1, module.qk_nope_head_dim + module.qk_rope_head_dim))
    q_nope, q_pe = torch.split(query, [module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    latent, k_pe = module.kv_a_proj_with_mqa(hidden).split([module.kv_lora_rank, module.qk_rope_head_dim], -1)
    turn = RULES[rule]
    rows = torch.cat([module.kv_a_layernorm(latent), turn(k_pe.unsqueeze(-2), positions).squeeze(-2)], -1)
    return Parts(*(t.flatten(0, 1) for t in (q_nope, turn(q_pe, positions), rows)))
