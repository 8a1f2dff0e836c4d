"""`pad_value_dim` against the reference: narrow values by kernels of wider ones."""

from __future__ import annotations

from hypothesis import given

from .harness import EXACT, GATES, Lowered, cases, dense, exact, families_of, gates, of_families, offers, takes

WIDE = takes(("dense", "varlen"), v_head_dim=False)
EVEN = takes(("dense", "varlen"), v_head_dim=(32, 64))


@EXACT
@given(of_families("dense", "varlen", head_dim=(8, 16), v_head_dim=(5, 1, 24), kv_heads=(1, 2, 3)))
def test_numbers_are_those_of_the_reference(case):
    narrow = case.request.v_head_dim < case.request.head_dim
    exact(case, WIDE if narrow else EVEN, ("pad_value_dim",))


@GATES
@given(cases(dtype="bfloat16", head_dim=(64,), v_head_dim=(40, 24)))
def test_gates_hold_in_half_precision(case):
    gates(case, WIDE, ("pad_value_dim",))


def test_what_it_offers():
    widths = [rewrite.inner[0].dims for rewrite in offers("pad_value_dim", dense(head_dim=72, v_head_dim=40))]
    assert (72, 72) in widths, "the width of Q and K"
    assert (72, 64) in widths, "a usual one"
    assert all(d == 72 and d_v > 40 for d, d_v in widths)
    plan = Lowered(takes(dims=((192, 128), (128, 128))), "autograd").plan(dense(head_dim=192, v_head_dim=96))
    assert plan.lines() == ["pad_value_dim: D_v 96 -> 128 (cost 3)"]


def test_it_offers_nothing_to_calls_over_a_cache():
    assert families_of("pad_value_dim", v_head_dim=40) == {"dense", "varlen"}
