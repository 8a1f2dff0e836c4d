"""`additive_mask` against the reference: bool masks by kernels that only add."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from polyattn.contract import Bound
from polyattn.lowering.additive_mask import AdditiveMask

from .harness import EXACT, GATES, cases, dense, exact, families_of, gates, of_families, offers, takes

ROWS = takes(("dense", "varlen", "paged", "mla"), mask=("none", "additive"))


@EXACT
@given(of_families("dense", "varlen", "paged", "mla", mask=("bool",)))
def test_numbers_are_those_of_the_reference(case):
    exact(case, ROWS, ("additive_mask",))


@GATES
@given(cases(dtype="bfloat16", head_dim=(64,), mask=("bool",)))
def test_gates_hold_in_half_precision(case):
    gates(case, ROWS, ("additive_mask",))


@pytest.mark.parametrize("batch, heads", [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_what_is_expanded_stays_one(batch, heads):
    """A mask that many samples or heads share is not written out for each."""
    one = torch.rand(batch, heads, 3, 5) < 0.5
    seen = []
    kernel = Bound(lambda *tensors, attn_mask: seen.append(attn_mask))
    request = dense(mask="bool", dtype="bfloat16").normalised()
    (rewrite,) = offers("additive_mask", request)
    query = torch.randn(2, 3, 4, 64)
    AdditiveMask().bind(request, rewrite, [kernel], []).forward(query, query, query, attn_mask=one.expand(2, 4, 3, 5))
    (mask,) = seen
    assert mask.dtype == torch.bfloat16
    assert mask.shape == one.shape
    assert torch.equal(mask, torch.where(one, 0.0, -math.inf).to(torch.bfloat16))


def test_what_it_offers():
    (rewrite,) = offers("additive_mask", dense(mask="bool"))
    assert rewrite.inner[0].mask == "additive"
    assert families_of("additive_mask", mask="bool") == {"dense", "varlen", "paged", "mla"}


def test_it_offers_nothing_for_trees_other_masks_and_dtypes_without_infinity():
    assert offers("additive_mask", dense(mask="bool", tree=True)) == []
    assert offers("additive_mask", dense(mask="additive")) == []
    assert offers("additive_mask", dense()) == []
    assert offers("additive_mask", dense(mask="bool", dtype="fp8_e4m3")) == []
