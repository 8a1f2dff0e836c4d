"""torch.func and forward-mode AD around a call: named for what they are, served with the right numbers or refused."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch.autograd import forward_ad

import polyattn
from polyattn.contract import Accepted, AttentionRequest
from polyattn.contract.capability import judge
from polyattn.dispatch.device_facts import transform
from polyattn.registry.manager import get_manager

F64 = torch.float64
CU = torch.tensor([0, 2, 5], dtype=torch.int32)
LENS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 3, "max_seqlen_k": 3}
SHAPE = (1, 5, 2, 8)


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=g, dtype=F64) for _ in range(3)]


def packed(query, key, value, **kw):
    return polyattn.varlen_attention(query[0], key[0], value[0], **LENS, **kw)


CALLS = {"dense": polyattn.attention, "varlen": packed}
HIDDEN = torch.ones(1, 1, 5, 5, dtype=torch.bool)
HIDDEN[..., 1, :] = HIDDEN[..., :3, 4] = False
"""Row 1 sees nothing."""
OPTIONS = {
    "plain": {},
    "window": {"causal": True, "window": (2, -1)},
    "bool mask": {"attn_mask": HIDDEN},
    "additive mask": {"attn_mask": torch.arange(25.0, dtype=F64).view(1, 1, 5, 5) / 10},
    "sinks": {"sinks": torch.tensor([0.3, -0.2], dtype=F64)},
    "lse": {"return_lse": True, "causal": True},
    "softcap": {"softcap": 2.0},
    "closed": {"attn_mask": torch.where(HIDDEN, 0.0, -torch.inf).to(F64)},
}


def dual(f):
    def tangent(q):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(q, torch.ones_like(q)))).tangent

    return tangent


F = torch.func
TRANSFORMS = {
    "functionalize": F.functionalize,
    "vmap": lambda f: lambda q: F.vmap(f)(torch.stack([q, 2 * q])),
    "grad": F.grad,
    "vjp": lambda f: lambda q: F.vjp(f, q)[1](torch.ones((), dtype=F64))[0],
    "per sample grad": lambda f: lambda q: F.vmap(F.grad(f))(torch.stack([q, 2 * q])),
    "jacrev of jacrev": lambda f: F.jacrev(F.jacrev(f)),
    "jvp": lambda f: lambda q: F.jvp(f, (q,), (torch.ones_like(q),))[1],
    "jacfwd": F.jacfwd,
    "hessian": F.hessian,
    "dual": dual,
}
WORDS = {
    "vjp": "grad",
    "per sample grad": "grad",
    "jacrev of jacrev": "gradgrad",
    "jacfwd": "jvp",
    "hessian": "jvp",
    "dual": "jvp",
}


def loss_of(call, q, k, v, **kw):
    result = call(q, k, v, **kw)
    parts = result if isinstance(result, tuple) else (result,)
    return sum(part.square().sum() for part in parts)


def definition(name, f, q):
    """By plain autograd over the reference, one derivative after the other."""
    if name in ("functionalize", "vmap"):
        return f(q) if name == "functionalize" else torch.stack([f(q), f(2 * q)])
    if name == "per sample grad":
        return torch.stack([definition("grad", f, q), definition("grad", f, 2 * q)])
    if name in ("jacrev of jacrev", "hessian"):
        return torch.autograd.functional.hessian(f, q)
    gradient = torch.autograd.functional.jacobian(f, q)
    return gradient.sum() if name in ("jvp", "dual") else gradient


@pytest.mark.slow(keep=36)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("family", CALLS)
def test_every_transform_gives_the_derivative_of_the_definition(family, name, option):
    q, k, v = tensors()
    call, given = CALLS[family], dict(OPTIONS[option])
    if family == "varlen" and "attn_mask" in given:
        given["attn_mask"] = given["attn_mask"][..., :3, :3]

    def loss(backend):
        return lambda q: loss_of(call, q, k, v, backend=backend, **given)

    if option == "lse" and name in ("jacrev of jacrev", "hessian"):
        given.pop("causal")
    want = definition(name, loss("reference"), q)
    for backend in (None, "reference"):
        torch.testing.assert_close(TRANSFORMS[name](loss(backend))(q), want, rtol=1e-9, atol=1e-10)
    assert want.abs().max() > 1e-3


def test_plain_packed_calls_under_a_transform_need_no_reference():
    asked = polyattn.AttentionRequest(family="varlen", layout="THD", heads=2, kv_heads=2, head_dim=8, v_head_dim=8)
    for word in ("functionalize", "vmap", "grad", "gradgrad", "jvp"):
        assert polyattn.explain(dataclasses.replace(asked, transform=word)).backend == "torch_native"


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_named_for_what_it_is(opaque, name):
    """All of torch.func was called vmap, and a dual tensor had no name: a kernel would have dropped the tangent."""
    q, k, v = tensors()
    word = WORDS.get(name, name)
    seen = []
    TRANSFORMS[name](lambda q: seen.append(transform(q, k, v)) or q.square().sum())(q)
    assert set(seen) == {word}
    with pytest.raises(polyattn.UnsupportedRequestError, match=re.escape(f"transform={word!r} is not declared")):
        TRANSFORMS[name](lambda q: polyattn.attention(q, k, v, backend="opaque").sum())(q)
    with pytest.raises(polyattn.UnsupportedRequestError, match=re.escape(f"transform={word!r} is not declared")):
        TRANSFORMS[name](lambda q: polyattn.attention(q, k, v, backend="flex_attention").sum())(q)


@pytest.mark.parametrize("which", ["query", "key", "value", "sinks", "attn_mask"])
@pytest.mark.parametrize("family", CALLS)
def test_a_tangent_of_any_tensor_counts(family, which):
    """Also where the call has been made often without one, and its kernel is found by guards."""
    q, k, v = tensors()
    size = 5 if family == "dense" else 3
    given = {"query": q, "key": k, "value": v, "sinks": torch.zeros(2, dtype=F64)}
    given["attn_mask"] = torch.ones(1, 1, size, size, dtype=F64)
    given = {name: t for name, t in given.items() if name in ("query", "key", "value", which)}
    call = CALLS[family]
    for _ in range(4):
        call(**given)

    def of(tensor, backend=None):
        return call(**{**given, which: tensor}, backend=backend).square().sum()

    got = dual(of)(given[which])
    want = torch.autograd.functional.jacobian(lambda t: of(t, "reference"), given[which]).sum()
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    with forward_ad.dual_level():
        torch.testing.assert_close(call(**given), call(**given, backend="reference"))


def test_lengths_may_not_be_mapped_over():
    q, k, v = (t[0] for t in tensors())
    lens = torch.stack([CU, CU])

    def one(cu):
        more = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 3, "max_seqlen_k": 3}
        return polyattn.varlen_attention(q, k, v, **more)

    with pytest.raises(polyattn.InvalidInputError, match=r"cu_seqlens_q cannot be read on the host: .*in_dims=None"):
        torch.func.vmap(one)(lens)


@pytest.mark.slow(keep=2)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("option", ["plain", "sinks", "lse", "softcap", "bool mask"])
@pytest.mark.parametrize("name", ["vmap", "grad", "per sample grad", "jvp", "jacfwd"])
def test_compiled_transforms_of_dense_calls(name, option):
    """The gradient of sinks was wrong by a quarter: dynamo says of no tensor in a transform that it requires one."""
    q, k, v = (t.float() for t in tensors())
    given = {n: t.float() if torch.is_tensor(t) and t.dtype == F64 else t for n, t in OPTIONS[option].items()}

    def loss(backend):
        return lambda q: loss_of(polyattn.attention, q, k, v, backend=backend, **given)

    torch._dynamo.reset()
    got = torch.compile(TRANSFORMS[name](loss(None)), backend="eager")(q)
    torch.testing.assert_close(got, TRANSFORMS[name](loss("reference"))(q), rtol=1e-4, atol=1e-5)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", ["grad", "per sample grad", "jvp", "jacfwd", "hessian"])
def test_compiled_derivatives_of_packed_calls_are_refused(name):
    """The custom op is a constant to them: the tangent was zero. (Behind a graph break torch itself stumbles.)"""
    q, k, v = tensors()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"inside a torch.func transform"):
        torch.compile(TRANSFORMS[name](lambda q: packed(q, k, v).sum()), backend="eager", fullgraph=True)(q)


def test_calls_over_a_cache_take_no_tangent():
    q = torch.randn(1, 2, 8)
    cache = torch.randn(2, 4, 2, 8)
    lens = {"page_table": torch.tensor([[1]], dtype=torch.int32), "seq_lens": torch.tensor([3], dtype=torch.int32)}
    lens |= {"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32), "max_seqlen_q": 1, "max_seqlen_k": 3}

    def call(query, value_cache):
        return polyattn.paged_attention(query, cache, value_cache, **lens).sum()

    call(q, cache)
    with pytest.raises(polyattn.InvalidInputError, match="forward-mode AD"):
        torch.func.jvp(lambda q: call(q, cache), (q,), (q,))
    with pytest.raises(polyattn.InvalidInputError, match="forward-mode AD"):
        dual(lambda c: call(q, c))(cache.clone())


@pytest.mark.parametrize("backend", ["torch_native", "reference"])
def test_lengths_under_functionalize_are_read_on_a_cpu_only(backend):
    """A functional tensor on an accelerator has no storage: `tolist()` ends in torch's own words there."""
    for platform in ("cpu", "cuda"):
        rows = [row for one in get_manager().backends[backend, platform].providers for row in one.rows]
        request = AttentionRequest(
            family="varlen", platform=platform, dtype="float32", head_dim=8, layout="THD", transform="functionalize"
        )
        verdict = judge(rows, request.normalised())
        assert isinstance(verdict, Accepted) is (platform == "cpu")
        if platform == "cuda":
            assert "transform='functionalize'" in str(verdict.reasons)
