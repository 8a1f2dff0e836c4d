"""What torch_sdpa does differently on a device that is not here, run with CPU tensors through the same adapter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import polyattn
from polyattn.backends.torch_sdpa import TorchSDPA
from polyattn.dispatch.call_key import Static
from polyattn.dispatch.dense import dense_request


def bound_for(platform, static, q, k, v, mask=None):
    request = dense_request(static, q, k, v, mask, None, None)
    return TorchSDPA().bind(dataclasses.replace(request, platform=platform))


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_mps_never_uses_the_causal_flag_nor_a_narrower_v(monkeypatch, causal, layout):
    calls = []
    whole = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, mask=None, dropout=0.0, is_causal=False, **kw):
        calls.append((is_causal, value.shape[-1] == query.shape[-1]))
        return whole(query, key, value, mask, dropout, is_causal, **kw)

    monkeypatch.setattr("polyattn.backends.torch_sdpa._sdpa", spy)
    shape = (lambda h, d: (2, 7, h, d)) if layout == "BSHD" else (lambda h, d: (2, h, 7, d))
    q, k, v = torch.randn(shape(4, 16)), torch.randn(shape(2, 16)), torch.randn(shape(2, 8))
    got = bound_for("mps", Static(causal=causal, layout=layout), q, k, v).forward(q, k, v)
    want = polyattn.attention(q, k, v, causal=causal, layout=layout, backend="reference")
    torch.testing.assert_close(got, want)
    assert calls == [(False, True)]


@pytest.mark.parametrize("platform", ["cuda", "rocm", "xpu", "musa", "npu", "mps"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_empty_rows_are_repaired_whatever_the_kernel_gives(monkeypatch, platform, kind):
    """S7: here the kernel answers NaN for a row without keys, as some do."""
    whole = torch.nn.functional.scaled_dot_product_attention

    def nan_rows(query, key, value, mask=None, *args, **kw):
        out = whole(query, key, value, mask, *args, **kw)
        dead = ~mask.any(-1) if mask.dtype == torch.bool else (mask == float("-inf")).all(-1)
        return out.masked_fill(dead[..., None], float("nan"))

    monkeypatch.setattr("polyattn.backends.torch_sdpa._sdpa", nan_rows)
    q, k, v = (torch.randn(2, 5, 4, 8, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 1, 5, 5) > 0.3
    mask[:, :, 2] = False
    mask = mask if kind == "bool" else torch.zeros(2, 1, 5, 5).masked_fill(~mask, float("-inf"))
    out = bound_for(platform, Static(), q, k, v, mask).forward(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, polyattn.attention(q, k, v, attn_mask=mask, backend="reference"))
    dq, dk, dv = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert (dq[:, 2] == 0).all()
    assert all(g.isfinite().all() for g in (dq, dk, dv))


def test_deterministic_backward_borrows_torchs_switch():
    from polyattn.backends import torch_sdpa

    with torch_sdpa._deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with torch_sdpa._deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kind", ["half", "single"])
def test_a_masks_gradient_goes_through_the_composite(kind):
    """On GPUs; here the same path with CPU tensors."""
    dtype = torch.bfloat16 if kind == "half" else torch.float32
    q, k, v = (
        torch.randn(2, 1, 4, 16, dtype=dtype),
        torch.randn(2, 6, 2, 16, dtype=dtype),
        torch.randn(2, 6, 2, 8, dtype=dtype),
    )
    mask = torch.randn(1, 4, 1, 6, dtype=dtype).requires_grad_()
    out = bound_for("cuda", Static(), q, k, v, mask).forward(q, k, v, attn_mask=mask)
    (got,) = torch.autograd.grad(out.float().square().sum(), mask)
    exact = mask.detach().double().requires_grad_()
    want = polyattn.attention(q.double(), k.double(), v.double(), attn_mask=exact, backend="reference")
    (wanted,) = torch.autograd.grad(want.square().sum(), exact)
    assert (got.double() - wanted).norm() / wanted.norm() < (1.5e-2 if kind == "half" else 1e-5)
