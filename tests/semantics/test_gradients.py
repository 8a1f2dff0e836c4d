"""The definition under autograd, torch.compile, vmap, autocast and dropout."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from polyattn.semantics.reference import attention, varlen_attention

F64 = torch.float64


def leaves(*shapes, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=gen, dtype=F64).requires_grad_() for s in shapes]


def qkv(B=1, S_q=3, S_k=4, H_q=2, H_kv=1, D=2, D_v=3):
    return leaves((B, S_q, H_q, D), (B, S_k, H_kv, D), (B, S_k, H_kv, D_v))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right", "window": (1, -1)},
        {"causal": "top_left", "softcap": 1.5},
        {"softcap": 0.7, "chunk": 2},
        {"window": (1, 0), "scale": 0.9},
    ],
    ids=str,
)
def test_s6_gradients_of_out_and_lse(options):
    q, k, v = qkv()
    sinks, alibi, bias = leaves((2,), (2,), (1, 2, 3, 4), seed=1)

    def call(q, k, v, sinks, alibi, bias):
        return attention(q, k, v, sinks=sinks, alibi=alibi, attn_mask=bias, return_lse=True, **options)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks, alibi, bias))


def test_s6_second_derivatives():
    q, k, v = qkv(S_q=2, S_k=3)
    (sinks,) = leaves((2,), seed=1)
    mask = torch.tensor([[True, True, False], [True, True, True]])[None, None]
    assert torch.autograd.gradgradcheck(
        lambda *t: attention(*t[:3], sinks=t[3], attn_mask=mask, softcap=2.0, return_lse=True), (q, k, v, sinks)
    )


def test_s5_gradient_of_a_sink_that_dominates():
    q, k, v = qkv()
    for nats in (-40.0, 30.0, 2000.0):
        sinks = torch.full((2,), nats, dtype=F64, requires_grad=True)
        out = attention(q, k, v, sinks=sinks)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, (q, k, v, sinks), dout)
        assert all(torch.isfinite(g).all() for g in grads)
        # d sink = -sum over rows of p_sink * (out . dout)
        _, lse = attention(q, k, v, return_lse=True)
        want = -(torch.sigmoid(nats - lse) * (out * dout).sum(-1)).sum((0, 1))
        torch.testing.assert_close(grads[3], want, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kind", ["position", "bool", "additive"])
@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_s7_gradients_of_empty_rows_are_exactly_zero(kind, through):
    # Rows 0 and 1 see nothing, row 2 sees keys 0 and 1.
    q, k, v = qkv(S_q=4, S_k=2) if kind == "position" else qkv(S_q=3, S_k=3)
    sinks, alibi = leaves((2,), (2,), seed=1)
    keep = torch.tensor([[False] * 3, [False] * 3, [True, True, False]])[None, None]
    bias = torch.zeros(1, 1, 3, 3, dtype=F64).masked_fill(~keep, -math.inf).requires_grad_()
    mask = {"position": None, "bool": keep, "additive": bias}[kind]
    causal = "bottom_right" if kind == "position" else "none"
    out, lse = attention(q, k, v, sinks=sinks, alibi=alibi, attn_mask=mask, softcap=3.0, causal=causal, return_lse=True)
    loss = torch.zeros((), dtype=F64)
    if through != "lse":
        loss = loss + (out * torch.randn_like(out)).sum()
    if through != "out":
        loss = loss + lse[:, 2:].sum()
    loss.backward()
    grads = [q.grad, k.grad, v.grad, alibi.grad, *([bias.grad] if kind == "additive" else [])]
    assert all(g is None or torch.isfinite(g).all() for g in grads)
    assert torch.equal(q.grad[:, :2], torch.zeros_like(q.grad[:, :2]))
    assert q.grad[:, 2].abs().sum() > 0
    if kind != "position":
        assert torch.equal(k.grad[:, 2], torch.zeros_like(k.grad[:, 2]))
    if kind == "additive":
        assert torch.equal(bias.grad[~keep], torch.zeros_like(bias.grad[~keep]))
        assert bias.grad[keep].abs().sum() > 0


def test_s7_when_every_row_is_empty_every_gradient_is_zero():
    q, k, v = qkv()
    sinks, alibi = leaves((2,), (2,), seed=1)
    bias = torch.full((1, 2, 3, 4), -math.inf, dtype=F64, requires_grad=True)
    out, lse = attention(q, k, v, sinks=sinks, alibi=alibi, attn_mask=bias, softcap=1.0, return_lse=True)
    (out.sum() + lse.exp().sum()).backward()
    for tensor in (q, k, v, sinks, alibi, bias):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_s7_varlen_sequence_without_keys_has_zero_gradients():
    q, k, v = leaves((5, 2, 2), (3, 1, 2), (3, 1, 3))
    lens_q, lens_k = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 0, 3], dtype=torch.int32)
    out = varlen_attention(q, k, v, cu_seqlens_q=lens_q, cu_seqlens_k=lens_k, max_seqlen_q=3, max_seqlen_k=3)
    out.sum().backward()
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(q.grad[:2], torch.zeros_like(q.grad[:2]))
    assert q.grad[2:].abs().sum() > 0


def test_s11_output_has_the_query_dtype_and_autocast_does_not_lower_the_arithmetic():
    q, k, v = (t.detach().float() for t in qkv(B=2, S_q=8, S_k=8, D=16))
    plain = attention(q, k, v, return_lse=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attention(q, k, v, return_lse=True)
        low = attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))
    assert low.dtype == torch.bfloat16


def test_s11_dropout_drops_weights_after_the_softmax():
    q, k, _ = (t.detach() for t in qkv(B=4, S_q=16, S_k=16, H_q=2, H_kv=2, D=2))
    eye = torch.eye(16, dtype=F64)[None, :, None, :].expand(4, -1, 2, -1)
    weights, lse = attention(q, k, eye, return_lse=True)
    torch.manual_seed(0)
    dropped, same_lse = attention(q, k, eye, dropout_p=0.25, return_lse=True)
    assert torch.equal(lse, same_lse)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], (weights / 0.75)[kept], rtol=1e-12, atol=0)
    # 2048 draws: the standard deviation of the kept fraction is 0.01.
    assert abs(kept.double().mean().item() - 0.75) < 0.05
    assert torch.equal(attention(q, k, eye, dropout_p=1.0), torch.zeros_like(eye))


def test_compiles_without_a_graph_break_and_without_recompiling_per_length():
    options = {"causal": "bottom_right", "window": (2, -1), "softcap": 2.0, "chunk": 3}
    compiled = []

    def count(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    def call(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, return_lse=True, max_bytes=1, **options)

    traced = torch.compile(call, fullgraph=True, backend=count)
    for S in (5, 6, 11):
        q, k, v = (t.detach() for t in qkv(B=2, S_q=S, S_k=S, H_q=4, H_kv=2))
        sinks = torch.zeros(4, dtype=F64)
        got, want = traced(q, k, v, sinks), attention(q, k, v, sinks=sinks, return_lse=True, **options)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert len(compiled) <= 2


def test_compiled_under_autocast_keeps_the_arithmetic():
    q, k, v = (t.detach().float() for t in qkv(B=2, S_q=8, S_k=8, D=16))
    traced = torch.compile(attention, fullgraph=True, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = traced(q, k, v)
    torch.testing.assert_close(got, attention(q, k, v), rtol=1e-6, atol=1e-6)


def test_shapes_without_data_on_the_meta_device():
    out, lse = attention(*(t.to("meta") for t in qkv()), causal="bottom_right", return_lse=True)
    assert out.shape == (1, 3, 2, 3)
    assert lse.shape == (1, 3, 2)


def test_compiled_gradients():
    q, k, v = qkv(S_q=4, S_k=4)
    want = torch.autograd.grad(attention(q, k, v, causal="bottom_right").sum(), (q, k, v))
    traced = torch.compile(attention, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(traced(q, k, v, causal="bottom_right").sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_vmap_over_a_stack_of_batches():
    q, k, v = (torch.stack([t.detach(), 2 * t.detach(), -t.detach()]) for t in qkv(B=2))
    options = {"causal": "bottom_right", "window": (1, -1), "softcap": 2.0, "return_lse": True}
    out, lse = torch.func.vmap(lambda *t: attention(*t, **options))(q, k, v)
    for i in range(3):
        want, want_lse = attention(q[i], k[i], v[i], **options)
        torch.testing.assert_close(out[i], want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[i], want_lse, rtol=1e-12, atol=1e-12)


def test_functional_gradients_equal_autograd():
    q, k, v = qkv()
    want = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
    got = torch.func.grad(lambda *t: attention(*t).square().sum(), argnums=(0, 1, 2))(q, k, v)
    assert all(torch.allclose(a, b) for a, b in itertools.zip_longest(got, want))
