"""torch's scaled_dot_product_attention on an NPU, from op-plugin 517f2e7: op_plugin/ops/opapi/
ScaledDotProductAttentionKernelNpuOpApi.cpp (torch 2.5 and later, 910B). It is npu_fusion_attention wherever that takes
dtype, mask and heads, with its own limits unasked: the width of V and tensors without elements among them. The rest is
torch's composite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from .arithmetic import check

__all__ = ["scaled_dot_product_attention"]

_math = torch.ops.aten._scaled_dot_product_attention_math


def scaled_dot_product_attention(lib: Library) -> object:
    """What takes torch's place, over the operators of a library."""
    fused = lib.modules["torch_npu"].npu_fusion_attention

    def sdpa(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        check(query.dtype == key.dtype == value.dtype, "Expected query, key, and value to have the same dtype")
        check(attn_mask is None or attn_mask.dtype in (torch.bool, query.dtype), "Expected attn_mask dtype to be bool")
        check(not (is_causal and attn_mask is not None), "The attn_mask should be none when is_causal is true")
        odd = query.dtype == torch.float32 and any(t.shape[-1] % 4 for t in (query, key, value))
        kind = attn_mask is None or attn_mask.dtype == torch.bool
        heads = query.dim() == key.dim() == value.dim() == 4 and query.shape[1] % key.shape[1] == 0
        if odd or not kind or not heads or query.shape[3] > 512 or query.dtype == torch.float64:
            mask = attn_mask
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
            more = {"scale": scale, "enable_gqa": enable_gqa}
            out: Tensor = _math(query, key, value, mask, dropout_p, is_causal, None, **more)[0]
            return out
        hidden = None
        if is_causal:
            hidden = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        elif attn_mask is not None:
            hidden = _shaped(attn_mask, query, key).logical_not()
        result: Tensor = fused(
            query,
            key,
            value,
            query.shape[1],
            "BNSD",
            atten_mask=hidden,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            keep_prob=1 - dropout_p,
            next_tockens=0 if is_causal else 2**31 - 1,
            inner_precise=2 if not is_causal and query.shape[2] > 1 and attn_mask is not None else 0,
            sparse_mode=2 if is_causal else 0,
        )[0]
        return result

    return sdpa


def _shaped(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """`preprocess_attn_mask_for_npu`: shapes that the operator does not know are expanded."""
    (B, N, S_q), S_k = query.shape[:3], key.shape[2]
    known = {(S_q, S_k), (B, N, S_q, S_k), (B, 1, S_q, S_k), (1, 1, S_q, S_k)}
    return mask if tuple(mask.shape) in known else mask.expand(B, N, S_q, S_k)
