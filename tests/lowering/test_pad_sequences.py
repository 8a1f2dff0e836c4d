"""`pad_sequences` against the reference: packed sequences by kernels for dense batches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from polyattn.contract import Bound
from polyattn.lowering import bind
from polyattn.lowering.pad_sequences import PadSequences
from polyattn.semantics.autograd import differentiable
from polyattn.semantics.reference import varlen_attention
from polyattn.testing.poison import poisoned

from .harness import EXACT, GATES, KINDS, Lowered, cases, dense, exact, families_of, gates, kernel, offers, takes

NAMES = ("pad_sequences",)
ROWS = takes(causal="none", window=((-1, -1),), chunk=0, mask=("bool", "additive"), zero_size=False, misaligned=False)
"""A dense kernel that knows masks and nothing of positions, and takes no tensor without elements."""

EMPTY = {
    "varlen": {
        "equal": (((0, 0), (0, 0)), ((0, 0),)),
        "one": (((1, 0), (0, 0)),),
        "fewer": (((0, 3), (0, 1)),),
        "more": (((3, 0), (2, 0)), ((0, 5),)),
    }
}


@settings(EXACT, max_examples=280)
@given(cases("varlen"))
def test_packed_by_a_dense_kernel(case):
    exact(case, ROWS, NAMES)


@settings(EXACT, max_examples=30)
@given(cases("varlen", grad=(("query", "key", "value"),)))
def test_padding_is_no_memory_that_nobody_wrote(case):
    with poisoned(torch.device("cpu")):
        exact(case, ROWS, NAMES)


@settings(EXACT, max_examples=20)
@given(cases("varlen", lengths=EMPTY))
def test_no_tokens(case):
    exact(dataclasses.replace(case, request=dataclasses.replace(case.request, zero_size=True)), ROWS, NAMES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("relation", ["equal", "one", "more"])
@pytest.mark.parametrize("mask", [None, torch.ones(0, 1, 1, 3, dtype=torch.bool), torch.zeros(1, 4, 1, 3)])
def test_no_sequences(kind, relation, mask):
    fields = {"mask": "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive", "lse": True}
    grad = ("query", "key", "value", "lse")
    request = dense(family="varlen", layout="THD", s_relation=relation, zero_size=True, grad=grad, **fields)
    q, k = (torch.zeros(0, 4, 64, requires_grad=True) for _ in range(2))
    bound = Lowered(ROWS, kind, NAMES).bound(request)
    forward = bound.forward if bound.backward is None else differentiable(bound, True)
    out, lse = forward(q, k, k, attn_mask=mask, **lens([0], [0], 1, 3))
    assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))
    assert [grad.shape for grad in torch.autograd.grad(out.sum() + lse.sum(), (q, k))] == [(0, 4, 64)] * 2


@settings(GATES, max_examples=8)
@given(cases("varlen", dtype="bfloat16", head_dim=(64,)))
def test_gates_hold_in_half_precision(case):
    gates(case, ROWS, NAMES)


def lens(query, key, most_q, most_k):
    cu_q = torch.tensor(query, dtype=torch.int32)
    cu_k = cu_q if key is query else torch.tensor(key, dtype=torch.int32)
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": most_q, "max_seqlen_k": most_k}


def padded(request, given, q, k):
    """What a kernel gets."""
    got = {}

    def forward(query, key, value, **more):
        got.update(more, query=query, key=key)
        return query

    (rewrite,) = offers("pad_sequences", request)
    kernels = [Bound(forward) for _ in rewrite.inner]
    assert PadSequences().bind(request.normalised(), rewrite, kernels, []).forward(q, k, k, **given).shape == q.shape
    return got


def test_zeros_lie_behind_each_sequence_and_nobody_sees_them():
    request = dense(family="varlen", layout="THD", s_relation="more", causal="bottom_right", heads=1, kv_heads=1)
    q, k = torch.arange(1.0, 4)[:, None, None], torch.arange(1.0, 7)[:, None, None]
    got = padded(request, lens([0, 2, 2, 3], [0, 3, 4, 6], 2, 3), q, k)
    assert got["query"][:, :, 0, 0].tolist() == [[1, 2], [0, 0], [3, 0]]
    assert got["key"][:, :, 0, 0].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert got["attn_mask"][:, 0].int().tolist() == [[[1, 1, 0], [1, 1, 1]], [[0] * 3, [0] * 3], [[1, 1, 0], [0] * 3]]


@pytest.mark.parametrize("most_q, most_k", [(7, 5), (5, 9), (5, 5)])
def test_bounds_of_equal_lengths_need_not_be_tight_or_equal(most_q, most_k):
    starts = [0, 5, 5, 8]
    request = dense(family="varlen", layout="THD", s_relation="equal", causal="bottom_right", mask="bool")
    q, mask = torch.randn(8, 4, 64), torch.rand(1, 4, most_q, most_k) < 0.7
    given = lens(starts, starts, most_q, most_k)
    out = Lowered(ROWS, "autograd", NAMES).bound(request).forward(q, q, q, attn_mask=mask, **given)
    torch.testing.assert_close(out, varlen_attention(q, q, q, attn_mask=mask, causal="bottom_right", **given))


@pytest.mark.parametrize("most_q, most_k", [(4, 4), (1, 9), (2, 9), (9, 2), (1, 1)])
def test_bounds_decide_the_relation_of_a_mixture(most_q, most_k):
    request = dense(family="varlen", layout="THD", s_relation="more", causal="bottom_right")
    q, k = torch.randn(2, 4, 64), torch.randn(3, 4, 64)
    given = lens([0, 1, 2], [0, min(2, most_k), 2 + (most_k > 1)], most_q, most_k)
    k = k[: 2 + (most_k > 1)]
    out = Lowered(ROWS, "autograd", NAMES).bound(request).forward(q, k, k, **given)
    torch.testing.assert_close(out, varlen_attention(q, k, k, causal="bottom_right", **given))


def test_kernels_of_both_kinds_are_trained_by_autograd():
    """A backend may bring a backward for one relation of the lengths and none for another."""
    request = dense(
        family="varlen",
        layout="THD",
        s_relation="more",
        dtype="float64",
        head_dim=8,
        lse=True,
        grad=("query", "key", "value", "lse"),
    )

    def load(inner):
        return kernel("explicit" if inner.s_relation == "fewer" else "autograd")(inner)

    bound = bind(Lowered(ROWS, "autograd", NAMES).plan(request), load, load)
    assert bound.backward is None
    tensors = [torch.randn(n, 4, 8, dtype=torch.float64, requires_grad=True) for n in (5, 9, 9)]
    given = lens([0, 3, 5], [0, 5, 9], 3, 5)

    def gradients(function, **more):
        out, lse = function(*tensors, **given, **more)
        return torch.autograd.grad(out.square().sum() + lse.square().sum(), tensors)

    for got, want in zip(gradients(bound.forward), gradients(varlen_attention, return_lse=True), strict=True):
        torch.testing.assert_close(got, want)


def test_padded_queries_are_empty_rows_in_the_backward_too():
    """A kernel's backward knows by lse = -inf that a row moves no gradient, whatever else was substituted."""
    request = dense(family="varlen", layout="THD", s_relation="more", heads=1, kv_heads=1, grad=("query",))
    (rewrite,) = offers("pad_sequences", request)
    got = {}

    def backward(dout, query, key, value, out, lse, **given):
        got.update(dout=dout, out=out, lse=lse)
        return query, key, value

    kernels = [Bound(lambda *tensors: None, backward) for _ in rewrite.inner]
    bound = PadSequences().bind(request.normalised(), rewrite, kernels, [])
    q, k, lse = torch.ones(3, 1, 64), torch.ones(5, 1, 64), torch.tensor([[1.0], [2.0], [3.0]])
    bound.backward(q, q, k, k, q, lse, **lens([0, 2, 3], [0, 3, 5], 2, 3))
    assert got["lse"][..., 0].tolist() == [[1, 2], [3, -torch.inf]]
    assert got["dout"][..., 0, 0].tolist() == got["out"][..., 0, 0].tolist() == [[1, 1], [1, 0]]


def test_nothing_waits_for_the_device():
    """No value of a tensor is read, and no shape depends on one: meta tensors have none."""
    request = dense(
        family="varlen",
        layout="THD",
        s_relation="more",
        causal="bottom_right",
        window=(3, -1),
        mask="additive",
        chunk=4,
    )
    with torch.device("meta"):
        q, k, mask = torch.zeros(6, 4, 64), torch.zeros(9, 4, 64), torch.zeros(1, 4, 4, 5)
        cu = {f"cu_seqlens_{x}": torch.zeros(4, dtype=torch.int32) for x in "qk"}
        got = padded(request, {**cu, "max_seqlen_q": 4, "max_seqlen_k": 5, "attn_mask": mask}, q, k)
    assert got["query"].shape == (3, 4, 4, 64)
    assert got["key"].shape == (3, 5, 4, 64)
    assert got["attn_mask"].shape == (3, 4, 4, 5)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"batch_invariant": True}, id="the padding depends on the rest of the batch"),
        pytest.param({"alibi": True}, id="distances"),
        pytest.param({"tree": True}, id="tree"),
        pytest.param({"transform": "subclass"}, id="subclass"),
    ],
)
def test_it_offers_nothing_for(fields):
    assert offers("pad_sequences", dense(family="varlen", layout="THD", **fields)) == []


def test_what_it_offers():
    (equal,) = offers("pad_sequences", dense(family="varlen", layout="THD", causal="bottom_right", window=(7, -1)))
    assert equal.inner == (dense(mask="bool").normalised(),)
    assert equal.cost == 12.0
    (one,) = offers("pad_sequences", dense(family="varlen", layout="THD", s_relation="one"))
    assert [inner.s_relation for inner in one.inner] == ["one", "equal"]
    (more,) = offers("pad_sequences", dense(family="varlen", layout="THD", s_relation="more", mask="additive"))
    assert [inner.s_relation for inner in more.inner] == ["equal", "one", "fewer", "more"]
    assert {inner.mask for inner in more.inner} == {"additive"}
    assert families_of("pad_sequences", layout="THD") == {"varlen"}
