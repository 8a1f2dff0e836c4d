"""The up-projection of latent rows, applied to keys and values (unabsorbed) or to queries and outputs (absorbed).

    (W_uk q) . c = q . (W_uk^T c)    and    sum_i p_i (W_uv c_i) = W_uv (sum_i p_i c_i)

so both forms are the same attention; what differs is what a kernel reads: H heads of D_nope + D_r and D_v numbers per
token, or one row of D_c + D_r for all heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ...semantics.reference import mla_absorb

__all__ = ["UpProjection", "absorb", "expand", "split_kv_b", "value_up"]


class UpProjection(NamedTuple):
    """The two halves of `kv_b_proj`, views of its weight.

    Attributes:
        w_uk: [H, D_nope, D_c], latent to the key without positions. w_uv: [H, D_v, D_c], latent to the value.
    """

    w_uk: Tensor
    w_uv: Tensor


def split_kv_b(weight: Tensor, nope: int, v_head_dim: int) -> UpProjection:
    """Take the weight of `kv_b_proj` apart.

    Args:
        weight: [H * (D_nope + D_v), D_c] as torch's Linear keeps it; of each head first the key's rows, then the
            value's. nope, v_head_dim: D_nope and D_v. H follows from them (a rank of tensor parallelism has fewer).

    Raises:
        InvalidInputError: a weight of another shape, or of numbers that products cannot be formed with.
    """
    each = nope + v_head_dim
    if weight.ndim != 2 or not weight.shape[0] or weight.shape[0] % each:
        raise InvalidInputError(
            f"the weight of kv_b_proj is {list(weight.shape)}; [H * ({nope} + {v_head_dim}), D_c] is needed, whole "
            f"heads of D_nope + D_v rows"
        )
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise InvalidInputError(
            f"the weight of kv_b_proj is {weight.dtype}; absorbing it needs real numbers: dequantise this layer to the "
            f"model's dtype when the model is loaded"
        )
    heads = torch.unflatten(weight, 0, (-1, each))
    return UpProjection(heads[:, :nope], heads[:, nope:])


def absorb(q_nope: Tensor, q_pe: Tensor, up: UpProjection) -> Tensor:
    """Queries [T, H, D_c + D_r] for latent rows, from [T, H, D_nope] and [T, H, D_r] (after RoPE)."""
    return mla_absorb(q_nope, q_pe, up.w_uk)


def value_up(out: Tensor, up: UpProjection) -> Tensor:
    """Outputs [T, H, D_v], from outputs [T, H, D_c] over latent rows."""
    return torch.einsum("thc,hdc->thd", out, up.w_uv)


def expand(rows: Tensor, up: UpProjection) -> tuple[Tensor, Tensor]:
    """Keys [T, H, D_nope + D_r] and values [T, H, D_v] of ordinary heads, from rows [T, D_c + D_r]."""
    heads, nope, latent = up.w_uk.shape
    c, pe = rows[:, :latent], rows[:, latent:]
    key = rows.new_empty(rows.shape[0], heads, nope + pe.shape[1])
    key[..., :nope] = torch.einsum("tc,hdc->thd", c, up.w_uk)
    key[..., nope:] = pe.unsqueeze(1)
    return key, torch.einsum("tc,hdc->thd", c, up.w_uv)
