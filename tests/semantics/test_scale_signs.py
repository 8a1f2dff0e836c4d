"""S2: a scale may be zero or negative; kernels that scale after their mask must not be handed one."""

from __future__ import annotations

import pytest
import torch

import polyattn


@pytest.mark.parametrize("backend", ["torch_sdpa", None])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("scale", [-0.3, 0.0, -0.0])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_dense(backend: str | None, lse: bool, scale: float, causal: bool | str) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]
    results, grads = [], []
    for name in (backend, "reference"):
        found = polyattn.attention(*tensors, causal=causal, scale=scale, return_lse=lse, backend=name)
        found = found if lse else (found,)
        results.append(found)
        grads.append(torch.autograd.grad(sum(t.square().sum() for t in found), tensors))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_packed(scale: float) -> None:
    q = torch.randn(9, 2, 8)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    lens = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 5, "max_seqlen_k": 5}
    found = [
        polyattn.varlen_attention(q, q, q, causal=True, scale=scale, backend=name, **lens)
        for name in ("torch_native", "reference")
    ]
    torch.testing.assert_close(*found)
