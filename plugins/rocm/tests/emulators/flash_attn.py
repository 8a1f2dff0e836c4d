"""flash-attn 2 on ROCm in its two builds: Composable Kernel (csrc/flash_attn_ck/*.cpp), and Triton, which AITER has
(aiter/ops/triton/_triton_kernels/flash_attn_triton_amd/{interface_v2,fwd_prefill}.py).

Composable Kernel's has a softcap among its arguments and no use for it; Triton's refuses it. Triton's LSE is 0 for rows
without keys that fill a block of queries, 128 here, and -inf for others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES
from .attention import Rule, attend, check, check_tensors, differentiate, parts

__all__ = ["library"]

BLOCK = 128


def library(build: str = "ck") -> Library:
    module = "flash_attn.flash_attn_interface"
    lib = Library("flash-attn", "2.8.3.post2", module, signatures=SIGNATURES)

    def rule(a: dict[str, Any], longest: int) -> Rule:
        if a["softcap"] and build == "triton":
            raise NotImplementedError("softcap is not supported in the AMD Triton FA2 interface (expected 0.0).")
        window = a["window_size"] if "window_size" in a else (a["window_size_left"], a["window_size_right"])
        left, right = (-1 if bound >= longest else bound for bound in window)
        scale = a["q"].shape[-1] ** -0.5 if a["softmax_scale"] is None else a["softmax_scale"]
        return Rule(scale, a["causal"], (left, right), 0.0, a.get("dropout_p", 0.0))

    def checked(a: dict[str, Any]) -> None:
        q, k, v = a["q"], a["k"], a["v"]
        check_tensors(q, k, v)
        check(q.shape[-1] == k.shape[-1] == v.shape[-1], "query, key and value must have one head_size")

    def one(q: Tensor, k: Tensor, v: Tensor, how: Rule) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, how)
        if build == "triton":
            blocks = [block.masked_fill((block == -torch.inf).all(), 0.0) for block in lse.split(BLOCK, -1)]
            lse = torch.cat(blocks, -1) if q.shape[0] else lse
        return out.to(q.dtype), lse

    @lib.function(module, "flash_attn.flash_attn_func")
    def flash_attn_func(**a: Any) -> Any:
        checked(a)
        how = rule(a, a["k"].shape[1])
        found = [one(*sequence, how) for sequence in zip(a["q"], a["k"], a["v"], strict=True)]
        out, lse = torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])
        return (out, lse, None) if a["return_attn_probs"] else out

    @lib.function(module, "flash_attn.flash_attn_varlen_func")
    def flash_attn_varlen_func(**a: Any) -> Any:
        checked(a)
        assert a["block_table"] is None
        how = rule(a, a["max_seqlen_k"])
        where = parts(a["cu_seqlens_q"], a["cu_seqlens_k"])
        found = [one(a["q"][x], a["k"][y], a["v"][y], how) for x, y in where]
        out, lse = torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], -1)
        return (out, lse, None) if a["return_attn_probs"] else out

    def gradients(a: dict[str, Any], where: list[tuple[Any, Any]], join: Any) -> Tensor:
        checked(a)
        lse, how = a["softmax_lse"], rule(a, a.get("max_seqlen_k", a["k"].shape[1]))
        check(lse.is_contiguous() and lse.dtype == torch.float32, "softmax_lse must be contiguous and float32")
        # Of -inf only Composable Kernel makes 0.
        assert build == "ck" or not bool((lse == -torch.inf).any()), "NaN"
        found = []
        for x, y in where:
            heads = lse[x] if join is torch.stack else lse[:, x]
            found.append(differentiate(a["dout"][x], a["q"][x], a["k"][y], a["v"][y], a["out"][x], heads, how))
        for name, side in zip(("dq", "dk", "dv"), zip(*found, strict=True), strict=True):
            a[name].copy_(join(side))
        return lse

    @lib.function(module, "flash_attn._flash_attn_backward")
    def _flash_attn_backward(**a: Any) -> Tensor:
        return gradients(a, [(i, i) for i in range(a["q"].shape[0])], torch.stack)

    @lib.function(module, "flash_attn._flash_attn_varlen_backward")
    def _flash_attn_varlen_backward(**a: Any) -> Tensor:
        return gradients(a, list(parts(a["cu_seqlens_q"], a["cu_seqlens_k"])), torch.cat)

    return lib
