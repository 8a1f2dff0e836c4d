"""Calls that reach a kernel through exact rewrites: eager, trained, compiled, explained."""

from __future__ import annotations

import logging

import pytest
import torch

import polyattn

F64 = torch.float64
OPTIONS = {"causal": True, "layout": "BHSD", "return_lse": True}


def inputs(dtype=F64, grad=False, seed=0):
    """BHSD, grouped heads, D = 20, D_v = 12, and sinks: nothing of it is what `narrow` takes."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, 5, 20), (2, 2, 7, 20), (2, 2, 7, 12), (4,))
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_(grad) for s in shapes]


def call(q, k, v, sinks, backend="narrow", **more):
    return polyattn.attention(q, k, v, sinks=sinks, backend=backend, **{**OPTIONS, **more})


def test_a_call_goes_through_a_chain(opaque):
    q, k, v, sinks = inputs()
    chosen = polyattn.explain(polyattn.attention, q, k, v, sinks=sinks, backend="narrow", **OPTIONS)
    assert set(chosen.lowerings) >= {"layout", "expand_gqa_heads", "sinks_from_lse"}
    assert chosen.plan.length <= 5
    found, expected = call(q, k, v, sinks), call(q, k, v, sinks, "reference")
    assert opaque.calls == 1
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_it_trains(opaque):
    leaves = inputs(grad=True)
    assert torch.autograd.gradcheck(lambda *given: call(*given), leaves)


def test_out_is_written(opaque):
    q, k, v, sinks = inputs()
    out = torch.full((2, 4, 5, 12), float("nan"), dtype=F64)
    result, _ = call(q, k, v, sinks, out=out)
    assert result is out
    torch.testing.assert_close(out, call(q, k, v, sinks, "reference")[0], rtol=1e-12, atol=1e-12)


def test_a_layer_keeps_its_fast_path(opaque):
    q, k, v, _sinks = inputs()
    site = polyattn.bind(**OPTIONS, backend="narrow")
    first = site(q, k, v)
    for _ in range(3):
        torch.testing.assert_close(site(q, k, v), first, rtol=0, atol=0)
    assert opaque.calls == 4


def test_compiled_it_is_one_opaque_op(opaque):
    torch.compiler.reset()
    leaves = inputs(torch.float32, grad=True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*leaves), call(*leaves, "reference")
    torch.testing.assert_close(found, expected)
    weights = [torch.randn_like(t) for t in expected]
    grads = [
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(result, weights, strict=True)), leaves)
        for result in (found, expected)
    ]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_packed_sequences_are_padded_for_a_dense_kernel():
    """torch_sdpa knows no packed sequences; under a mask nothing but the reference takes them as they are."""
    q = torch.randn(9, 2, 16)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    lens = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 5, "max_seqlen_k": 5}
    chosen = polyattn.explain(polyattn.varlen_attention, q, q, q, backend="torch_sdpa", **lens)
    assert chosen.lowerings == ("pad_sequences",)
    torch.testing.assert_close(
        polyattn.varlen_attention(q, q, q, backend="torch_sdpa", **lens),
        polyattn.varlen_attention(q, q, q, backend="reference", **lens),
    )


def test_what_no_rewrite_reaches_is_refused_with_the_kernels_reasons(opaque):
    q, k, v, sinks = inputs()
    with pytest.raises(polyattn.UnsupportedRequestError, match=r"softcap=30.0 is not declared"):
        call(q, k, v, sinks, softcap=30.0)


def test_rewrites_are_logged_when_chosen(opaque, caplog):
    with caplog.at_level(logging.INFO, "polyattn.selection"):
        call(*inputs())
    (line,) = [r.getMessage() for r in caplog.records if "narrow@cpu" in r.getMessage()]
    assert "via " in line
    assert "sinks_from_lse" in line
