"""Derivatives beyond a plain backward: second ones, in-place changes before the backward, `out=` beside gradients."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.compiled_autograd

import polyattn
from polyattn.contract import Bound
from polyattn.semantics.autograd import differentiable

F64 = torch.float64
CU = torch.tensor([0, 3, 5], dtype=torch.int32)


def inputs(dtype=F64, seed=0):
    """q [1, 5, 4, 8], k and v [1, 5, 2, 8], sinks [4]"""
    g = torch.Generator().manual_seed(seed)
    shapes = ((1, 5, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8), (4,))
    return [torch.randn(shape, generator=g, dtype=dtype) for shape in shapes]


def packed(query, key, value, cu=CU, **kw):
    lens = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 3, "max_seqlen_k": 3}
    return polyattn.varlen_attention(query[0], key[0], value[0], **lens, **kw)


CALLS = {"dense": polyattn.attention, "varlen": packed}
KEPT = {"sinks": {"sinks": True}, "lse": {"return_lse": True}, "both": {"sinks": True, "return_lse": True}}


def loss_of(call, q, k, v, s, *, linear=False, **kw):
    result = call(q, k, v, sinks=s if kw.pop("sinks", False) else None, **kw)
    parts = result if isinstance(result, tuple) else (result,)
    return sum((p if linear else p.square()).sum() for p in parts)


def by_grad(f, q):
    q = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(q), q, create_graph=True)
    return torch.autograd.grad(first.square().sum(), q)[0]


def hessian_of(f, q):
    """[n, n] by central differences of first derivatives."""
    rows = []
    for step in 1e-5 * torch.eye(q.numel(), dtype=q.dtype).view(-1, *q.shape):
        ends = [(q + step).requires_grad_(), (q - step).requires_grad_()]
        above, below = (torch.autograd.grad(f(x), x)[0].flatten() for x in ends)
        rows.append((above - below) / 2e-5)
    return torch.stack(rows)


SECOND = {
    "hessian": lambda f, q: torch.autograd.functional.hessian(f, q),
    "hvp": lambda f, q: torch.autograd.functional.hvp(f, q, torch.ones_like(q))[1],
    "vhp": lambda f, q: torch.autograd.functional.vhp(f, q, torch.ones_like(q))[1],
    "create_graph": by_grad,
}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("way", SECOND)
@pytest.mark.parametrize("family", CALLS)
def test_second_derivatives_are_refused_by_kernels_and_right_by_the_reference(family, way, kept, linear):
    """They were exact zeros: a kernel's gradients are numbers, and nothing said so where the loss is linear in them."""
    q, k, v, s = inputs()

    def loss(backend):
        return lambda q: loss_of(CALLS[family], q, k, v, s, linear=linear, backend=backend, **KEPT[kept])

    with pytest.raises(polyattn.UnsupportedRequestError, match=r'second derivative.*backend="reference"'):
        SECOND[way](loss(None), q)
    got = SECOND[way](loss("reference"), q)
    hessian = hessian_of(loss("reference"), q)
    (first,) = torch.autograd.grad(loss("reference")(at := q.clone().requires_grad_()), at)
    want = {"hessian": hessian, "create_graph": hessian @ (2 * first.flatten())}.get(way, hessian.sum(0))
    torch.testing.assert_close(got.reshape(want.shape), want, rtol=1e-4, atol=1e-6)
    assert want.abs().max() > 1e-2


def test_second_derivatives_of_an_opaque_kernel_are_refused(opaque):
    q, k, v, _ = inputs(torch.float32)
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    with pytest.raises(polyattn.UnsupportedRequestError, match="second derivative"):
        by_grad(lambda q: polyattn.attention(q, k, v, backend="opaque").sum(), q)


@pytest.mark.parametrize("family", CALLS)
def test_second_derivatives_of_a_compiled_call_are_refused(family):
    """The custom ops, in code that autograd itself runs."""
    q, k, v, s = inputs(torch.float32)
    traced = torch.compile(lambda q: loss_of(CALLS[family], q, k, v, s, sinks=True), backend="eager")
    with pytest.raises(polyattn.UnsupportedRequestError, match="second derivative"):
        by_grad(traced, q)


@pytest.mark.parametrize("family", CALLS)
def test_gradients_of_many_outputs_at_once(family):
    """`vectorize=True` maps over a backward, and a kernel's takes one gradient at a time."""
    given = inputs()

    def rows(backend):
        return lambda q, k, v, s: CALLS[family](q, k, v, sinks=s, backend=backend).flatten()[::29]

    with pytest.raises(polyattn.UnsupportedRequestError, match="gradients of many outputs"):
        torch.autograd.functional.jacobian(rows(None), tuple(given), vectorize=True)
    want = torch.autograd.functional.jacobian(rows(None), tuple(given))
    got = torch.autograd.functional.jacobian(rows("reference"), tuple(given), vectorize=True)
    torch.testing.assert_close(got, want)


def test_gradients_mapped_over_by_vmap():
    q, k, v, s = inputs()
    q.requires_grad_()
    out = polyattn.attention(q, k, v, sinks=s)
    grads = torch.stack([torch.ones_like(out), torch.zeros_like(out)])
    with pytest.raises(polyattn.UnsupportedRequestError, match="vmap over a backward"):
        torch.func.vmap(lambda dout: torch.autograd.grad(out, q, dout, retain_graph=True)[0])(grads)


MASKS = {"bool mask": torch.tensor([True, False, True, True, True]), "additive mask": torch.tensor([0.0, 1, 2, -1, 0])}


def written(tensor):
    with torch.no_grad():
        if tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.mul_(2)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("which", ["query", "key", "value", "sinks", *MASKS])
def test_what_a_backward_reads_may_not_be_written_to_before_it(which, kept):
    """torch's own error of versions, of everything that is read again; gradients were off by two to nine times."""
    q, k, v, s = inputs(torch.float32)
    q.requires_grad_()
    tensors, options = {"query": q, "key": k, "value": v, "sinks": s}, dict(KEPT[kept])
    if which == "sinks" and "sinks" not in options:
        options["sinks"] = True
    if which in MASKS:
        options["attn_mask"] = tensors[which] = MASKS[which].expand(1, 1, 5, 5).clone()
    loss = loss_of(polyattn.attention, q, k, v, s, **options)
    written(tensors[which])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_lengths_that_a_packed_kernel_reads_again_may_not_be_written_to():
    q, cu = torch.randn(5, 2, 8, requires_grad=True), CU.clone()

    def forward(query, key, value, *, cu_seqlens_q, attn_mask):
        with torch.no_grad():
            return query * cu_seqlens_q[1], query.new_zeros(query.shape[:2])

    def backward(dout, query, key, value, out, lse, *, cu_seqlens_q, attn_mask):
        return dout * cu_seqlens_q[1], torch.zeros_like(key), torch.zeros_like(value)

    call = differentiable(Bound(forward, backward), False)
    out = call(q, q.detach(), q.detach(), cu_seqlens_q=cu, attn_mask=None)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q, retain_graph=True)[0], torch.full_like(q, 3.0))
    cu[1] = 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("which", ["query", "key", "value", "sinks", "attn_mask"])
def test_out_is_refused_beside_any_gradient(family, which):
    """It was left as it was where only the sinks or the mask wanted one."""
    q, k, v, s = inputs(torch.float32)
    size = 5 if family == "dense" else 3
    mask = torch.zeros(1, 1, size, size)
    {"query": q, "key": k, "value": v, "sinks": s, "attn_mask": mask}[which].requires_grad_()
    out = torch.empty(q.shape if family == "dense" else q.shape[1:])
    given = {"sinks": s} if which == "sinks" else {"attn_mask": mask} if which == "attn_mask" else {}
    call = CALLS[family]
    with pytest.raises(polyattn.InvalidInputError, match=r"out= cannot be used while gradients are wanted"):
        call(q, k, v, out=out, **given)
    with torch.no_grad():
        torch.testing.assert_close(call(q, k, v, out=out, **given), call(q, k, v, **given))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("family", "backend"), [("dense", None), ("varlen", None), ("dense", "opaque")])
@pytest.mark.parametrize("kept", KEPT)
def test_compiled_autograd_of_an_eager_forward(opaque, kept, family, backend):
    """A backward is traced where it can be, and left to eager code where it cannot."""
    q, k, v, s = (t.requires_grad_() for t in inputs(torch.float32))
    k, v = (t.detach().repeat_interleave(2, 2).requires_grad_() for t in (k, v))
    mask = {"attn_mask": MASKS["bool mask"].expand(1, 1, 5, 5)} if family == "dense" and not backend else {}
    names = (q, k, v, s) if "sinks" in KEPT[kept] else (q, k, v)

    def loss():
        return loss_of(CALLS[family], q, k, v, s, backend=backend, **mask, **KEPT[kept])

    want = torch.autograd.grad(loss(), names)
    torch._dynamo.reset()
    out = loss()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=backend is None)):
        out.backward()
    torch.testing.assert_close([t.grad for t in names], list(want))
