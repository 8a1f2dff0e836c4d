"""`fold_scale` against the reference: any scale by kernels of D ** -0.5."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from polyattn.semantics.reference import attention

from .harness import EXACT, GATES, cases, dense, exact, families_of, gates, of_families, offers, takes

ROWS = takes(("dense", "varlen", "paged"), scale=False)
SCALES = (0.3, 1.0, 0.0, -0.5, 0.01)


def other(request):
    """1.0 is the default of a head dim of 1."""
    return request.scale is not None


@EXACT
@given(of_families("dense", "varlen", "paged", scale=SCALES, where=other))
def test_numbers_are_those_of_the_reference(case):
    exact(case, ROWS, ("fold_scale",))


# Of the default: larger by a factor that is no power of two, smaller by one that is.
@GATES
@given(cases(dtype="bfloat16", head_dim=(64,), scale=(0.1875, 0.0625, 0.17, -0.15, 0.0)))
def test_gates_hold_in_bfloat16_although_the_query_is_rounded(case):
    gates(case, ROWS, ("fold_scale",))


@GATES
@given(cases(dtype="float16", head_dim=(40, 64), scale=(0.2, 0.11, 0.03)))
def test_gates_hold_in_float16(case):
    gates(case, ROWS, ("fold_scale",))


@pytest.mark.parametrize("factor", [0.25, 2.0, -4.0])
def test_powers_of_two_give_the_same_bits(factor):
    q, k, v = (torch.randn(1, 33, 2, 64, generator=torch.manual_seed(i)).to(torch.bfloat16) for i in range(3))
    assert torch.equal(attention(q * factor, k, v), attention(q, k, v, scale=factor / 8))


def test_what_it_offers():
    (rewrite,) = offers("fold_scale", dense(scale=0.25))
    assert rewrite.inner[0].scale is None
    assert rewrite.detail == "Q * 2"
    assert families_of("fold_scale", scale=0.25) == {"dense", "varlen", "paged"}, "MLA's scale is always explicit"
    assert offers("fold_scale", dense()) == []
    assert offers("fold_scale", dense(scale=64**-0.5)) == []


def test_it_does_not_bring_float16_near_its_end_or_round_a_quantised_query():
    assert offers("fold_scale", dense(dtype="float16", head_dim=256, scale=1.0)) != []
    assert offers("fold_scale", dense(dtype="float16", head_dim=320, scale=1.0)) == []
    assert offers("fold_scale", dense(dtype="bfloat16", head_dim=320, scale=1.0)) != []
    assert offers("fold_scale", dense(dtype="fp8_e4m3", scale=0.25)) == []
