"""The fp32/fp64 definition of softmax attention: the code every backend is checked against.

It is written to be read next to docs/semantics.md (numbers S1 to S12), in plain PyTorch: differentiable everywhere,
the LSE included, with no custom op. `attention` (dense.py) is the definition; the packed, paged and latent forms
only say which rows of which tensor are queries, keys and values, and then call it.

Arithmetic is float32 (float64 for float64 inputs, or on request), also under autocast. On a GPU the global TF32
switches of torch apply to float32 products: ask for `compute_dtype=torch.float64` where that matters.

Shape letters: B batch, N sequences, S_q / S_k lengths, T tokens of a packed batch, H_q / H_kv heads, D head dim of Q
and K, D_v head dim of V, D_c / D_r latent and rope widths of MLA. Inputs are taken as valid: the calls validate them.
"""

from __future__ import annotations

from .dense import attention
from .linear import gated_delta_rule, unit_rows
from .memory import score_bytes
from .mla import mla_absorb, mla_attention, mla_unabsorbed_attention, mla_unpack_fp8
from .paged import paged_attention
from .varlen import varlen_attention
from .visibility import alibi_bias, same_segment, tree_mask, verify_mask, visible

__all__ = [
    "alibi_bias",
    "attention",
    "gated_delta_rule",
    "mla_absorb",
    "mla_attention",
    "mla_unabsorbed_attention",
    "mla_unpack_fp8",
    "paged_attention",
    "same_segment",
    "score_bytes",
    "tree_mask",
    "unit_rows",
    "varlen_attention",
    "verify_mask",
    "visible",
]
