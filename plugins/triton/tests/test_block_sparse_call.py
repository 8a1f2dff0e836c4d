"""`polyattn.block_sparse_attention` by the kernels of this package, beside the mask that a map stands for."""

from __future__ import annotations

import torch

import polyattn

from .test_metadata import DEVICE


def test_a_call_is_served_with_its_gradients_and_lse():
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 130, h, 64, device=DEVICE, requires_grad=True) for h in (2, 1, 1))
    block_map = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.bool, device=DEVICE)[None, None]
    given = {"block_map": block_map, "block_shape": (64, 64), "return_lse": True}
    said = polyattn.explain(polyattn.block_sparse_attention, q, k, v, **given, backend="triton")
    assert (said.backend, said.lowerings) == ("triton", ())
    found = polyattn.block_sparse_attention(q, k, v, **given, backend="triton")
    right = polyattn.block_sparse_attention(q, k, v, **given, backend="reference")
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
    grads, rights = (
        torch.autograd.grad(out.square().sum() + lse.nan_to_num(neginf=0.0).sum(), (q, k, v))
        for out, lse in (found, right)
    )
    torch.testing.assert_close(grads, rights, atol=1e-3, rtol=1e-3)
