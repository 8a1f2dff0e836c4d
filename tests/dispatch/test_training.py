"""Gradients: through the output, the LSE, sinks and merged partials; checkpointing; autocast; function transforms."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import polyattn
from polyattn.nn import LocalAttention
from polyattn.semantics.autograd import attention_backward

F64 = torch.float64


def leaves(s_q=5, s_k=7, h=4, h_kv=2, d=8, d_v=8, dtype=F64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((2, s_q, h, d), (2, s_k, h_kv, d), (2, s_k, h_kv, d_v))
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes]


def grads(loss, inputs):
    return torch.autograd.grad(loss, inputs)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("backend", ["torch_sdpa", "reference", "opaque"])
def test_gradcheck_through_output_lse_and_sinks(opaque, backend):
    """S5, S6: torch_sdpa's LSE op and the stranger's kernel know neither sinks nor a gradient of the LSE."""
    q, k, v = leaves(h_kv=4 if backend == "opaque" else 2, d_v=4)
    sinks = torch.linspace(-1, 1, 4, dtype=F64).requires_grad_()

    def call(q, k, v, sinks):
        return polyattn.attention(q, k, v, causal=True, sinks=sinks, return_lse=True, backend=backend)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks))


def test_lse_gradient_survives_half_precision():
    """The two-column substitution: a bf16 `out` must not round dlse to eight bits."""
    inputs = [t.detach().bfloat16().requires_grad_() for t in leaves(32, 32)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    lse = polyattn.attention(*inputs, return_lse=True)[1]
    weight = torch.rand(lse.shape, dtype=F64)
    got = grads((lse * weight.float()).sum(), inputs[:2])
    want = grads((polyattn.attention(*exact, return_lse=True, backend="reference")[1] * weight).sum(), exact[:2])
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() / b.norm() < 8e-3


def test_merged_partials_train_like_one_call():
    q, k, v = leaves()
    cuts = (0, 3, 7)
    parts = [polyattn.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in pairwise(cuts)]
    out, lse = polyattn.merge(*zip(*parts, strict=True))
    dense, dense_lse = polyattn.attention(q, k, v, return_lse=True, backend="reference")
    torch.testing.assert_close((out, lse), (dense, dense_lse))
    merged = grads(out.square().sum() + lse.sum(), (q, k, v))
    torch.testing.assert_close(merged, grads(dense.square().sum() + dense_lse.sum(), (q, k, v)))


def test_a_detached_lse_is_caught():
    """What the refusal protects from: with detached LSEs dQ is off by about half, and nothing else shows it."""
    q, k, v = leaves()
    halves = [polyattn.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 3), slice(3, 7))]
    outs, lses = zip(*halves, strict=True)
    with pytest.raises(polyattn.InvalidInputError, match="detach"):
        polyattn.merge(outs, [lse.detach() for lse in lses])
    weights = torch.softmax(torch.stack([lse.detach() for lse in lses]), 0)
    wrong = grads(sum(w[..., None] * o for w, o in zip(weights, outs, strict=True)).square().sum(), (q,))[0]
    right = grads(polyattn.attention(q, k, v).square().sum(), (q,))[0]
    assert (wrong - right).norm() / right.norm() > 0.2


def test_substituted_out_and_lse_give_a_parts_share():
    """The contract of `Bound.backward`: with the merged (out, lse) each part's backward is its share of the whole."""
    from polyattn.dispatch.binding import choose
    from polyattn.dispatch.call_key import Static
    from polyattn.dispatch.dense import dense_request

    q, k, v = leaves(h_kv=4)
    out, lse = polyattn.attention(q, k, v, return_lse=True)
    dout = torch.ones_like(out)
    want = grads(out.sum(), (q, k, v))
    shares = []
    for s in (slice(0, 3), slice(3, 7)):
        part = [t.detach().requires_grad_() for t in (q, k[:, s], v[:, s])]
        request = dense_request(Static(return_lse=True), *part, None, None, None)
        bound = choose(request, "torch_sdpa", ("", "", "")).bound
        shares.append(attention_backward(bound.backward, dout, None, *part, out, lse, None, 2, {})[:3])
    torch.testing.assert_close(shares[0][0] + shares[1][0], want[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([shares[0][i], shares[1][i]], 1), want[i])


@pytest.mark.parametrize("lse", [False, True])
def test_empty_rows_have_zero_gradients(lse):
    """S7, with more queries than keys under a bottom-right mask: the first rows see nothing."""
    q, k, v = leaves(7, 5, dtype=torch.float32)
    result = polyattn.attention(q, k, v, causal=True, return_lse=lse)
    out = result[0] if lse else result
    assert (out[:, :2] == 0).all()
    got = grads(out.square().sum(), (q, k, v))
    assert (got[0][:, :2] == 0).all()
    assert all(g.isfinite().all() for g in got)


def test_checkpoint_keeps_the_backend_with_backward_outside(opaque):
    q, k, v = leaves(h_kv=4, dtype=torch.float32)

    def block(q, k, v):
        return polyattn.attention(q, k, v, causal=True)

    with polyattn.use_backend("opaque"):
        out = checkpoint(block, q, k, v, use_reentrant=False, context_fn=polyattn.checkpoint_context_fn)
        assert opaque.calls == 1
    worker = threading.Thread(target=lambda: out.sum().backward())
    worker.start()
    worker.join()
    assert opaque.calls == 2, "the recomputation must use the forward's backend, in any thread"
    want = grads(polyattn.attention(q, k, v, causal=True).sum(), (q, k, v))
    torch.testing.assert_close([q.grad, k.grad, v.grad], list(want))


def test_checkpoint_without_the_context_recomputes_elsewhere(opaque):
    """Why `checkpoint_context_fn` exists."""
    q, k, v = leaves(h_kv=4, dtype=torch.float32)
    with polyattn.use_backend("opaque"):
        out = checkpoint(lambda *a: polyattn.attention(*a).square(), q, k, v, use_reentrant=False)
    calls = opaque.calls
    with pytest.raises(Exception, match=r"recomputation|checkpoint"):
        out.sum().backward()
    assert opaque.calls == calls


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_sdpa_does(dtype, lse):
    """S11"""
    q, k, v = leaves(5, 5, h_kv=4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out = polyattn.attention(q, k.to(dtype), v, causal=True, return_lse=lse)
        want = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    out, found = out if lse else (out, None)
    assert out.dtype == want.dtype == dtype
    torch.testing.assert_close(out, want.transpose(1, 2), rtol=2e-2, atol=2e-2)
    assert found is None or found.dtype == torch.float32
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_autocast_reaches_the_definition_in_full_precision():
    q, k, v = leaves(5, 5, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = polyattn.attention(q, k, v, backend="reference")
    want = polyattn.attention(*(t.bfloat16() for t in (q, k, v)), backend="reference")
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_autocast_leaves_float64_alone():
    q, k, v = leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert polyattn.attention(q, k, v).dtype == F64


def test_vmap_is_served_or_refused():
    q, k, v = (t.detach() for t in leaves(h_kv=4, dtype=torch.float32))
    batched = [torch.stack([t, t + 1]) for t in (q, k, v)]
    with pytest.warns(UserWarning, match="batching rule"):  # torch's own, for its CPU flash op
        out = torch.func.vmap(lambda *a: polyattn.attention(*a, causal=True))(*batched)
    torch.testing.assert_close(out[1], polyattn.attention(*(t[1] for t in batched), causal=True))
    with pytest.raises(polyattn.UnsupportedRequestError, match="transform='vmap'"):
        torch.func.vmap(lambda *a: polyattn.attention(*a, backend="flex_attention"))(*batched)


def test_layer_drops_out_in_training_only():
    q, k, v = (t.detach() for t in leaves(64, 64, dtype=torch.float32))
    layer = LocalAttention(dropout_p=0.5)
    assert not torch.equal(layer(q, k, v), layer(q, k, v))
    layer.eval()
    torch.testing.assert_close(layer(q, k, v), polyattn.attention(q, k, v), rtol=0, atol=0)
    assert repr(layer) == "LocalAttention(dropout_p=0.5)"


def test_layer_captures_its_choice(opaque):
    q, k, v = (t.detach() for t in leaves(h_kv=4, dtype=torch.float32))
    with polyattn.use_backend("opaque"):
        layer = LocalAttention()
    layer(q, k, v)
    assert opaque.calls == 1
    assert polyattn.explain(layer, q, k, v).source == "use_backend"


def test_out_is_written_and_returned():
    q, k, v = (t.detach() for t in leaves(dtype=torch.float32))
    for backend in ("torch_sdpa", "flex_attention", "reference"):
        for options in ({}, {"return_lse": True}):
            out = torch.full((2, 5, 4, 8), float("nan"))
            got = polyattn.attention(q, k, v, out=out, backend=backend, **options)
            assert (got[0] if options else got) is out
            torch.testing.assert_close(out, polyattn.attention(q, k, v))


def test_out_may_not_overlap_an_input():
    """S1, also where the two start at different addresses."""
    buffer = torch.randn(768)
    q, k, v = (torch.randn(2, 4, 4, 8) for _ in range(3))
    q = buffer[:256].view(2, 4, 4, 8)
    for start in (0, 16, 255):
        with pytest.raises(polyattn.InvalidInputError, match="shares memory"):
            polyattn.attention(q, k, v, out=buffer[start : start + 256].view(2, 4, 4, 8))
    polyattn.attention(q, k, v, out=buffer[256:512].view(2, 4, 4, 8))


@pytest.mark.parametrize("backend", ["torch_sdpa", "flex_attention", "reference"])
def test_no_grad_serves_tensors_that_could_have_one(backend):
    q, k, v = leaves(dtype=torch.float32)
    with torch.no_grad():
        out = polyattn.attention(q, k, v, causal=True, backend=backend)
    assert not out.requires_grad
    torch.testing.assert_close(out, polyattn.attention(q, k, v, causal=True).detach())
