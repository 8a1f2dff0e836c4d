"""`page_table_to_tokens` against the reference."""

from __future__ import annotations

from hypothesis import given

from .harness import EXACT, GATES, Lowered, families_of, offers, takes
from .serving import cached, exact, gates, steps

TOKENS = takes(("paged", "mla"), page_size=1)
PAGES = {"family": ("paged", "mla"), "kv_layout": ("NHD",), "window": ((-1, -1), (3, -1)), "mask": ("none", "additive")}


@EXACT
@given(steps(**PAGES, kv=(("auto", ""), ("fp8_e4m3", "token"), ("fp8_e5m2", "tensor")), page_size=(2, 4, 6)))
def test_tokens_are_the_smallest_pages(step):
    exact(step, TOKENS, ("page_table_to_tokens",))


@GATES
@given(steps(dtype="bfloat16", **PAGES, page_size=(16, 64), head_dim=(64,), v_head_dim=(64,)))
def test_gates_hold_in_half_precision(step):
    gates(step, TOKENS, ("page_table_to_tokens",))


def test_larger_pages_are_preferred():
    plan = Lowered(takes("paged", page_size=(1, 2)), "autograd").plan(cached(page_size=8))
    assert plan.names == ("finer_pages",)
    (rewrite,) = offers("page_table_to_tokens", cached(page_size=8))
    assert (rewrite.inner[0].page_size, rewrite.cost, rewrite.detail) == (1, 0.5, "pages of 8 -> 1")


def test_what_it_does_not_offer():
    assert families_of("page_table_to_tokens", page_size=8) == {"paged", "mla"}
    for fields in ({"page_size": 1}, {"kv_layout": "HND"}, {"kv_parts": 2}):
        assert not offers("page_table_to_tokens", cached(**fields)), fields
