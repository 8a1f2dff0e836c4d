"""`tree_by_lse` against the reference: trees of ragged drafts over ragged prefixes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from .harness import EXACT, GATES, Lowered, families_of, offers, takes
from .serving import cached, exact, gates, make, run, steps

PLAIN = takes(("paged", "mla"), phase=("extend", "decode"), tree=False, mask=False, spec_topk=False)
TREES = {"family": ("paged", "mla"), "phase": ("verify",), "mask": ("bool",), "fixed": (("tree", True),)}
KV = (("auto", ""), ("auto", ""), ("fp8_e4m3", "head"), ("fp8_e5m2", "token"))


@EXACT
@given(steps(**TREES, kv=KV))
def test_drafts_see_the_prefix_and_their_ancestors(step):
    exact(step, PLAIN, ("tree_by_lse",))


@GATES
@given(steps(dtype="bfloat16", **TREES, head_dim=(64,), v_head_dim=(64,), page_size=(16,)))
def test_gates_hold_in_half_precision(step):
    gates(step, PLAIN, ("tree_by_lse",))


def verify(**fields):
    return cached(**{"phase": "verify", "tree": True, "mask": "bool", "dtype": "float64", **fields})


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_one_mask_may_serve_all(heads, batch):
    """[N|1, H_q|1, ...]: one tree for every sequence, or one for every head."""
    step = make(verify(), ((3, 11), (3, 11)), 0, mask="tree")
    mask = step.given["attn_mask"][:batch].expand(batch, heads, -1, -1).contiguous()
    if heads > 1:
        mask[:, 1, :, -3:] = torch.eye(3, dtype=torch.bool)
    exact(dataclasses.replace(step, given={**step.given, "attn_mask": mask}), PLAIN, ("tree_by_lse",))


def test_a_mask_that_looks_ahead_meets_the_causal_one():
    step = make(verify(causal="bottom_right"), ((4, 9),), 0, mask="tree")
    step.given["attn_mask"][..., -4:] = True
    exact(step, PLAIN, ("tree_by_lse",))
    plain = dataclasses.replace(step, request=dataclasses.replace(step.request, causal="none"))
    exact(plain, PLAIN, ("tree_by_lse",))


def test_the_mask_before_the_drafts_is_not_read():
    step = make(verify(), ((3, 11), (2, 6)), 0, mask="tree")
    right = run(step, PLAIN, ("tree_by_lse",))
    for n, (s_q, s_k) in enumerate(step.lengths):
        step.given["attn_mask"][n, :, :, : s_k - s_q] = False
    assert torch.equal(run(step, PLAIN, ("tree_by_lse",)), right)


def test_a_padding_row_may_hold_anything():
    """Its query, its pages and its part of the mask are whatever an engine left there."""
    step = make(verify(sinks=True, lse=True), ((2, 9), (2, 0)), 0, mask="tree")
    step.tensors[0][2:] = torch.nan
    out, lse = run(step, PLAIN, ("tree_by_lse",))
    assert out[:2].isfinite().all()
    assert out[2:].eq(0).all()
    assert lse[2:].eq(-torch.inf).all()


@pytest.mark.parametrize("lengths", [((0, 5), (0, 0)), ((1, 0),), ()], ids=["no drafts", "padding only", "nothing"])
def test_nothing_to_verify(lengths):
    tokens = sum(q for q, _ in lengths)
    step = make(verify(zero_size=not tokens, lse=True), lengths, 0, mask="tree")
    exact(step, PLAIN, ("tree_by_lse",))


def test_the_drafts_are_a_dense_call_that_any_backend_may_serve():
    (rewrite,) = offers("tree_by_lse", verify(kv_dtype="fp8_e4m3", kv_layout="HND", sinks=True, spec_topk=4))
    (prefix,) = rewrite.inner
    assert (prefix.phase, prefix.mask, prefix.tree, prefix.sinks, prefix.lse) == ("extend", "none", False, False, True)
    assert (prefix.kv_dtype, prefix.page_size, prefix.spec_topk) == ("fp8_e4m3", 8, 0)
    (drafts,) = rewrite.helpers
    assert drafts == dataclasses.replace(
        cached(dtype="float64", family="dense", causal="none", phase="prefill"),
        layout="BSHD",
        s_relation="equal",
        mask="bool",
        lse=True,
        scale=0.25,
        page_size=0,
    )


def test_without_anybody_for_the_drafts_there_is_no_plan():
    target = Lowered(PLAIN, "autograd", helper=lambda request: None)
    with pytest.raises(AssertionError, match="there is no plan"):
        target.plan(verify())


def test_what_it_does_not_offer():
    tree = {"tree": True, "mask": "bool", "page_size": 8}
    assert families_of("tree_by_lse", **tree) == {"paged", "mla"}
    assert offers("tree_by_lse", verify(mask="none")), "a question that has no tensors yet"
    refused = [
        verify(tree=False),
        verify(mask="additive"),
        verify(window=(3, -1)),  # of the prefix a draft further down sees less
        verify(chunk=4),
        verify(causal="top_left"),
        verify(alibi=True),
        verify(kv_parts=1),
        verify(chunked_prefix=True),
    ]
    for request in refused:
        assert not offers("tree_by_lse", request), request.summary()
