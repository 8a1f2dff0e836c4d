"""`align_causal` against the reference: lengths that differ, by kernels for square calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from polyattn.contract import Bound
from polyattn.errors import UnsupportedRequestError
from polyattn.lowering import bind
from polyattn.lowering.lengths import check_size
from polyattn.semantics.reference import attention

from .harness import EXACT, GATES, KINDS, Lowered, cases, dense, exact, families_of, gates, kernel, offers, takes

NAMES = ("align_causal",)
SQUARE = takes(s_relation="equal")
PARTS = (*takes(s_relation="equal", causal=("none", "bottom_right")), *takes(causal="none"))
"""A kernel that knows a causal mask for square calls only: what the first and the other rows of a split need."""

CROP = {"causal": ("top_left",), "s_relation": ("fewer", "one")}
DROP = {"causal": ("bottom_right",), "s_relation": ("more",)}
PAD = {"causal": ("none", "bottom_right"), "s_relation": ("fewer", "one")}
SPLIT = {
    "causal": ("top_left",),
    "s_relation": ("more",),
    "window": ((-1, -1),),
    "chunk": (0,),
    "where": lambda request: request.causal == "top_left",
}
# The rows after the square part: fewer than the keys, one, as many, and more.
SPLITS = {"dense": {"more": ((7, 4), (5, 4), (8, 4), (9, 3), (2, 1))}}

QUARTER, FEW = settings(EXACT, max_examples=75), settings(GATES, max_examples=5)
"""There are four ways: together they are as many cases as of other rewrites."""


@QUARTER
@given(cases(**CROP))
def test_top_left_with_fewer_queries_needs_no_key_past_them(case):
    exact(case, SQUARE, NAMES)


@QUARTER
@given(cases(lengths=SPLITS, **SPLIT))
def test_top_left_with_more_queries_is_a_square_call_and_an_unmasked_one(case):
    exact(case, PARTS, NAMES)


@QUARTER
@given(cases(where=lambda r: r.causal == "bottom_right" or r.chunk, **{**DROP, "causal": ("bottom_right", "none")}))
def test_bottom_right_with_more_queries_leaves_empty_rows_away(case):
    exact(case, SQUARE, NAMES)


@QUARTER
@given(cases(**PAD))
def test_bottom_right_with_fewer_queries_is_a_square_call_with_rows_before_them(case):
    exact(case, SQUARE, NAMES)


@FEW
@given(cases(dtype="bfloat16", head_dim=(64,), **CROP))
def test_gates_hold_when_cropped(case):
    gates(case, SQUARE, NAMES)


@FEW
@given(cases(dtype="bfloat16", head_dim=(64,), **SPLIT))
def test_gates_hold_when_split(case):
    gates(case, PARTS, NAMES)


@FEW
@given(cases(dtype="bfloat16", head_dim=(64,), **DROP))
def test_gates_hold_when_dropped(case):
    gates(case, SQUARE, NAMES)


@FEW
@given(cases(dtype="bfloat16", head_dim=(64,), **PAD))
def test_gates_hold_when_padded(case):
    gates(case, SQUARE, NAMES)


def watched(request, S_q, S_k):
    """(S_q, S_k) of each call that the kernel gets."""
    seen = []

    def load(inner):
        def forward(query, key, value, **given):
            seen.append((query.shape[1], key.shape[1]))
            return kernel("autograd")(inner).forward(query, key, value, **given)

        return type(kernel("autograd")(inner))(forward)

    q, k = torch.randn(1, S_q, 4, 64), torch.randn(1, S_k, 4, 64)
    rows = PARTS if request.causal == "top_left" and request.s_relation == "more" else SQUARE
    bind(Lowered(rows, "autograd", NAMES).plan(request), load, load).forward(q, k, k)
    return seen


def test_the_kernel_gets_no_more_than_is_needed():
    assert watched(dense(causal="top_left", s_relation="fewer"), 3, 9) == [(3, 3)]
    assert watched(dense(causal="top_left", s_relation="one"), 1, 9) == [(1, 1)]
    assert watched(dense(causal="bottom_right", s_relation="more"), 9, 3) == [(3, 3)]
    assert watched(dense(causal="bottom_right", s_relation="fewer"), 3, 9) == [(9, 9)]
    assert watched(dense(causal="top_left", s_relation="more"), 9, 3) == [(3, 3), (6, 3)]


def test_parts_of_both_kinds_are_trained_by_autograd():
    """A backend may bring a backward for one relation of the lengths and none for another."""
    request = dense(
        dtype="float64",
        head_dim=8,
        causal="top_left",
        s_relation="more",
        lse=True,
        grad=("query", "key", "value", "lse"),
    )

    def load(inner):
        return kernel("explicit" if inner.causal == "bottom_right" else "autograd")(inner)

    bound = bind(Lowered(PARTS, "autograd", NAMES).plan(request), load, load)
    assert bound.backward is None
    tensors = [torch.randn(1, n, 4, 8, dtype=torch.float64, requires_grad=True) for n in (7, 4, 4)]

    def gradients(function, **given):
        out, lse = function(*tensors, **given)
        return torch.autograd.grad(out.square().sum() + lse.square().sum(), tensors)

    for got, want in zip(
        gradients(bound.forward), gradients(attention, causal="top_left", return_lse=True), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 2, 5, dtype=torch.bool), torch.full((1, 1, 2, 5), -torch.inf)])
def test_rows_that_are_added_see_keys(mask):
    """Kernels are slow, or wrong, where a row is empty."""
    got = []
    request = dense(s_relation="fewer", mask="bool" if mask.dtype == torch.bool else "additive")

    def forward(query, key, value, attn_mask):
        got.append(attn_mask)
        return query

    bind(Lowered(SQUARE, "autograd", NAMES).plan(request), lambda inner: Bound(forward), None).forward(
        torch.zeros(1, 2, 4, 64), *[torch.zeros(1, 5, 4, 64)] * 2, attn_mask=mask
    )
    added = torch.ones(1, 1, 3, 5, dtype=torch.bool) if mask.dtype == torch.bool else torch.zeros(1, 1, 3, 5)
    assert torch.equal(got[0], torch.cat([added, mask], 2))


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_is_written_in_parts(kind):
    request = dense(causal="top_left", s_relation="more")
    q, k = torch.randn(2, 9, 4, 64), torch.randn(2, 4, 4, 64)
    out = torch.full((2, 9, 4, 64), float("nan"))
    assert Lowered(PARTS, kind, NAMES).bound(request).forward(q, k, k, out=out) is out
    torch.testing.assert_close(out, attention(q, k, k, causal="top_left"))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"s_relation": "equal", "causal": "bottom_right"}, id="nothing to align"),
        pytest.param({"s_relation": "more"}, id="more queries that all see something"),
        pytest.param({"s_relation": "more", "window": (2, 1)}, id="more queries, and a window that looks ahead"),
        pytest.param({"s_relation": "more", "causal": "top_left", "window": (2, -1)}, id="split, window"),
        pytest.param({"s_relation": "more", "causal": "top_left", "chunk": 4}, id="split, chunk"),
        pytest.param({"s_relation": "more", "causal": "top_left", "alibi": True}, id="split, distances"),
        pytest.param({"s_relation": "more", "causal": "top_left", "dropout": 0.1}, id="split, weights dropped twice"),
        pytest.param({"s_relation": "fewer", "zero_size": True}, id="empty tensors"),
        pytest.param({"s_relation": "fewer", "tree": True}, id="tree"),
        pytest.param({"s_relation": "fewer", "transform": "subclass"}, id="subclass"),
    ],
)
def test_it_offers_nothing_for(fields):
    assert offers("align_causal", dense(**fields)) == []


def test_it_offers_nothing_to_packed_and_cached_calls():
    assert families_of("align_causal", s_relation="fewer", causal="bottom_right") == {"dense"}


def test_what_costs_how_much():
    def cost(**fields):
        (rewrite,) = offers("align_causal", dense(**fields))
        return rewrite.cost

    assert cost(causal="top_left", s_relation="fewer") == 0
    assert cost(causal="bottom_right", s_relation="more") == 2
    assert cost(causal="top_left", s_relation="more") == 8
    padded = cost(causal="bottom_right", s_relation="fewer")
    assert 8 < padded < cost(s_relation="one"), "S_k rows are computed for the sake of S_q, or of one"


def test_a_tensor_that_the_kernel_was_not_chosen_for_is_refused():
    """Plans know no sizes: what a rewrite adds may pass the limit that `large` is about."""
    request = dense(causal="bottom_right", s_relation="fewer")
    # An expanded tensor: nothing of this size is in memory.
    query = torch.zeros(1).expand(1, 2, 4, 64)
    key = torch.zeros(1).expand(1, 2**23, 1, 64)
    with pytest.raises(UnsupportedRequestError, match=r"padding S_q to S_k makes a tensor of 2147483648 elements"):
        Lowered(SQUARE, "autograd", NAMES).bound(request).forward(query, key, key)
    check_size(dense(large=True), "anything", 2**31)
