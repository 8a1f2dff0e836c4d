"""`layout` against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from polyattn.testing.cases import Case

from .harness import EXACT, GATES, Lowered, cases, dense, exact, families_of, gates, offers, takes

OTHER = {"BSHD": "BHSD", "BHSD": "BSHD"}


@EXACT
@given(cases(dropout=(0.0,)))
def test_kernels_of_one_layout_serve_the_other(case):
    exact(case, takes(layout=OTHER[case.request.layout]), ("layout",))


@GATES
@given(cases(dtype="bfloat16", head_dim=(64, 40)))
def test_gates_hold_in_half_precision(case):
    gates(case, takes(layout=OTHER[case.request.layout]), ("layout",))


def test_it_costs_nothing_and_says_what_it_does():
    (rewrite,) = offers("layout", dense(layout="BSHD"))
    assert (rewrite.cost, rewrite.detail) == (0.0, "BSHD as BHSD")
    assert rewrite.inner == (dense(layout="BHSD", v_head_dim=64),)


def test_it_offers_nothing_to_packed_and_cached_calls():
    assert families_of("layout") == {"dense"}
    assert families_of("layout", layout="THD") == set()


def test_an_output_is_written_through_without_a_copy():
    """The kernel gets the caller's memory in its own layout."""
    seen = []

    class Watched(Lowered):
        def bound(self, request):
            load = self.load

            def watching(inner):
                bound = load(inner)

                def forward(*tensors, out=None, **given):
                    seen.append((out.shape, out.data_ptr()))
                    return bound.forward(*tensors, out=out, **given)

                return type(bound)(forward, bound.backward)

            self.load = watching
            return super().bound(request)

    query = torch.randn(2, 5, 4, 8)
    out = torch.empty(2, 5, 4, 8)
    case = Case(request=dense(head_dim=8), lengths=((5, 5),) * 2)
    given = {"query": query, "key": query, "value": query}
    assert Watched(takes(layout="BHSD"), "autograd", ("layout",)).call(case, given, {}, out) is out
    assert seen == [((2, 4, 5, 8), out.data_ptr())]


@pytest.mark.parametrize("dtype, width, odd", [("bfloat16", 8, False), ("bfloat16", 12, True), ("float32", 12, False)])
def test_views_of_odd_rows_count_as_misaligned(dtype, width, odd):
    (rewrite,) = offers("layout", dense(dtype=dtype, head_dim=width))
    assert rewrite.inner[0].misaligned is odd
