"""`crop_value_dim` against the reference: wide values by kernels of narrow ones, a slice of columns at a time."""

from __future__ import annotations

import pytest
from hypothesis import given

from polyattn.contract import Range

from .harness import EXACT, GATES, Lowered, cases, dense, exact, families_of, gates, of_families, offers, takes

ROWS = takes(("dense", "varlen"), v_head_dim=Range(1, 16))
WIDE = {"head_dim": (16, 8), "v_head_dim": (24, 17)}


@EXACT
@given(of_families("dense", "varlen", **WIDE))
def test_numbers_are_those_of_the_reference(case):
    # Padding D first makes fewer slices of some.
    exact(case, ROWS, ("crop_value_dim",), only=("crop_value_dim",))


@GATES
@given(cases(dtype="bfloat16", head_dim=(64,), v_head_dim=(128, 160)))
def test_gates_hold_in_half_precision(case):
    gates(case, takes(v_head_dim=Range(8, 64)), ("crop_value_dim",))


def test_what_it_offers():
    found = {r.detail: [i.dims for i in r.inner] for r in offers("crop_value_dim", dense(head_dim=96, v_head_dim=160))}
    assert found == {
        "D_v 160 in 2 slices of 128": [(96, 128), (96, 32)],
        "D_v 160 in 2 slices of 96": [(96, 96), (96, 64)],
        "D_v 160 in 3 slices of 64": [(96, 64), (96, 32)],
    }
    (rewrite,) = offers("crop_value_dim", dense(head_dim=64, v_head_dim=128))
    assert [r.dims for r in rewrite.inner] == [(64, 64)], "each width is bound once"


def test_the_fewest_slices_are_chosen():
    plan = Lowered(takes(v_head_dim=Range(8, 256)), "autograd").plan(dense(head_dim=64, v_head_dim=512))
    assert plan.rewrite.detail == "D_v 512 in 2 slices of 256"


@pytest.mark.parametrize("dtype, width, odd", [("bfloat16", 24, False), ("bfloat16", 20, True), ("float32", 20, False)])
def test_slices_of_odd_rows_count_as_misaligned(dtype, width, odd):
    (rewrite,) = offers("crop_value_dim", dense(dtype=dtype, head_dim=8, v_head_dim=width))
    assert {inner.misaligned for inner in rewrite.inner} == {odd}


def test_it_offers_nothing_where_calls_would_drop_other_weights():
    assert offers("crop_value_dim", dense(v_head_dim=128, dropout=0.1)) == []


def test_it_offers_nothing_for_narrow_values_or_calls_over_a_cache():
    assert offers("crop_value_dim", dense(v_head_dim=64)) == []
    assert offers("crop_value_dim", dense(v_head_dim=32)) == []
    assert families_of("crop_value_dim", v_head_dim=128) == {"dense", "varlen"}
