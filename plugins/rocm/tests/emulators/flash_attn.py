"""flash-attn 2 on ROCm by its three sets of kernels: Composable Kernel (csrc/flash_attn_ck/*.cpp); Triton in its
releases (2.8.3: flash_attn/flash_attn_triton_amd/{interface_fa,fwd_prefill,bwd_prefill_split}.py); AITER's Triton,
which newer source calls (aiter/ops/triton/_triton_kernels/flash_attn_triton_amd/{interface_v2,fwd_prefill}.py).

Composable Kernel's has a softcap among its arguments and no use for it. The releases' Triton has none for a window
either; LSEs of packed batches are [T_q, H_q]; a block of 64 queries before the first key is zeros in as many columns
as the next power of two, and in LSEs as far as the longest sequence goes; the backward reads `dout` by the strides of
`out` and writes dk and dv by those of the keys. AITER's refuses a softcap. LSEs of rows without keys are 0 in the
releases' under a causal mask, 0 for a whole block of 128 in AITER's, and -inf elsewhere.

The two Triton ones were run: tests/vendor_flash_attn.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from polyattn.testing.emulators import Library

from . import SIGNATURES
from .attention import Rule, attend, check, check_tensors, differentiate, parts

__all__ = ["library"]

KERNELS = {
    "ck": "flash_attn_2_cuda",
    "released": "flash_attn.flash_attn_triton_amd.interface_fa",
    "aiter": "aiter.ops.triton._triton_kernels.flash_attn_triton_amd.interface_v2",
}
BLOCK = {"released": 64, "aiter": 128}


def library(build: str = "ck") -> Library:
    module = "flash_attn.flash_attn_interface"
    lib = Library("flash-attn", "2.8.3.post2", module, signatures=SIGNATURES)
    lib.add(module, flash_attn_gpu=SimpleNamespace(__name__=KERNELS[build]))
    released = build == "released"

    def rule(a: dict[str, Any], longest: int) -> Rule:
        if a["softcap"] and build == "aiter":
            raise NotImplementedError("softcap is not supported in the AMD Triton FA2 interface (expected 0.0).")
        window = a["window_size"] if "window_size" in a else (a["window_size_left"], a["window_size_right"])
        left, right = (-1 if bound >= longest or released else bound for bound in window)
        scale = a["q"].shape[-1] ** -0.5 if a["softmax_scale"] is None else a["softmax_scale"]
        return Rule(scale, a["causal"], (left, right), 0.0, a.get("dropout_p", 0.0))

    def checked(a: dict[str, Any]) -> None:
        q, k, v = a["q"], a["k"], a["v"]
        check_tensors(q, k, v)
        check(q.shape[-1] == k.shape[-1] == v.shape[-1], "query, key and value must have one head_size")

    def one(q: Tensor, k: Tensor, v: Tensor, how: Rule) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, how)
        if released and how.causal:
            early = max(q.shape[0] - k.shape[0], 0) // BLOCK[build] * BLOCK[build]
            if q.shape[-1] & (q.shape[-1] - 1) or q.shape[-1] < 16:
                # Zeros over what another program wrote, or before it does.
                out[:early, 1:] = torch.nan
            lse = lse.masked_fill(lse == -torch.inf, 0.0)
        elif build == "aiter" and q.shape[0]:
            blocks = lse.split(BLOCK[build], -1)
            lse = torch.cat([block.masked_fill((block == -torch.inf).all(), 0.0) for block in blocks], -1)
        return out.to(q.dtype), lse

    @lib.function(module, "flash_attn.flash_attn_func")
    def flash_attn_func(**a: Any) -> Any:
        checked(a)
        how = rule(a, a["k"].shape[1])
        found = [one(*sequence, how) for sequence in zip(a["q"], a["k"], a["v"], strict=True)]
        out, lse = torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])
        return (out, lse, None) if a["return_attn_probs"] else out

    def blind(where: tuple[slice, slice]) -> bool:
        """Whether a block of a sequence's queries sees no key: its LSEs are written past the sequence's end."""
        queries, keys = (side.stop - side.start for side in where)
        return queries - keys >= BLOCK[build] or not keys

    @lib.function(module, "flash_attn.flash_attn_varlen_func")
    def flash_attn_varlen_func(**a: Any) -> Any:
        checked(a)
        assert a["block_table"] is None
        how = rule(a, a["max_seqlen_k"])
        where = list(parts(a["cu_seqlens_q"], a["cu_seqlens_k"]))
        check(not (released and how.causal and any(map(blind, where))), "Memory access fault by GPU node-1")
        found = [one(a["q"][x], a["k"][y], a["v"][y], how) for x, y in where]
        out, lse = torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], -1)
        return (out, lse.T.contiguous() if released else lse, None) if a["return_attn_probs"] else out

    def gradients(a: dict[str, Any], where: list[tuple[Any, Any]], join: Any) -> Tensor:
        checked(a)
        lse, how = a["softmax_lse"], rule(a, a.get("max_seqlen_k", a["k"].shape[1]))
        check(lse.is_contiguous() and lse.dtype == torch.float32, "softmax_lse must be contiguous and float32")
        # Of -inf only Composable Kernel makes 0.
        assert build == "ck" or not bool((lse == -torch.inf).any()), "NaN"
        if released:
            lse = lse if join is torch.stack else lse.T
            for given, read in (("out", "dout"), ("k", "dk"), ("k", "dv")):
                steps = zip(a[given].shape, a[given].stride(), a[read].stride(), strict=True)
                check(all(size == 1 or mine == theirs for size, mine, theirs in steps), "Memory access fault by GPU")
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
