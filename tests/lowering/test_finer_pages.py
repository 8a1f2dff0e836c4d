"""`finer_pages` against the reference, and what it cannot see through."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from polyattn.errors import UnsupportedRequestError

from .harness import EXACT, GATES, Lowered, families_of, offers, takes
from .serving import cached, exact, gates, make, run, steps, words

SMALL = takes(("paged", "mla"), page_size=2)
LENGTHS = ((3, 8), (1, 5), (2, 0))
PAGES = {"family": ("paged", "mla"), "kv_layout": ("NHD",), "window": ((-1, -1), (3, -1)), "mask": ("none", "bool")}


@EXACT
@given(steps(**PAGES, kv=(("auto", ""), ("fp8_e4m3", "token"), ("fp8_e5m2", "head")), page_size=(4, 6, 12)))
def test_smaller_pages_are_the_same_memory(step):
    exact(step, SMALL, ("finer_pages",))


@GATES
@given(steps(dtype="bfloat16", **PAGES, page_size=(16, 64), head_dim=(64,), v_head_dim=(64,)))
def test_gates_hold_in_half_precision(step):
    gates(step, takes(("paged", "mla"), page_size=8), ("finer_pages",))


def interleaved(step, axis):
    """The same step with the caches in one pool [pages, 2, P, ...] or [pages, P, 2, ...]."""
    both = torch.stack(step.tensors[1:], axis)
    return dataclasses.replace(step, tensors=(step.tensors[0], *both.unbind(axis)))


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["apart", "by page", "by token"])
@pytest.mark.parametrize("P", [4, 12])
def test_keys_and_values_may_share_a_pool(axis, P):
    """As some engines lay them out: other data lies between the pages, or between the tokens."""
    step = make(cached(dtype="float64", page_size=P, save_kv_cache=True, lse=True), LENGTHS, 0, new=True)
    exact(interleaved(step, axis), SMALL, ("finer_pages",))


def test_a_pool_that_is_no_view_of_smaller_pages_is_named():
    step = make(cached(dtype="float64"), LENGTHS, 0)
    # A gap of one row behind each page.
    gapped = [torch.cat([t, t[:, :1]], 1)[:, :8] for t in step.tensors[1:]]
    broken = dataclasses.replace(step, tensors=(step.tensors[0], *gapped))
    with pytest.raises(
        UnsupportedRequestError, match=r"pages of 8 tokens cannot .* pages of 2 .* key_cache has strides"
    ):
        run(broken, SMALL, ("finer_pages",))


def test_caches_that_are_laid_out_differently_are_named():
    step = make(cached(dtype="float64"), LENGTHS, 0)
    query, _key_cache, value_cache = step.tensors
    mixed = dataclasses.replace(step, tensors=(query, interleaved(step, 1).tensors[1], value_cache))
    with pytest.raises(UnsupportedRequestError, match=r"at one multiple of 2 rows for all: make the caches contiguous"):
        run(mixed, SMALL, ("finer_pages",))


def test_scales_by_token_must_lie_like_their_caches():
    step = make(cached(dtype="float64", kv_dtype="fp8_e4m3", kv_scales="token"), LENGTHS, 0)
    with pytest.raises(UnsupportedRequestError, match=r"key_cache has strides .* k_scale has strides"):
        run(interleaved(step, 1), SMALL, ("finer_pages",))


def test_the_largest_pages_that_the_kernel_takes_are_chosen():
    plan = Lowered(takes("paged", page_size=(1, 2, 3, 4)), "autograd").plan(cached(page_size=12))
    assert plan.lines() == ["finer_pages: pages of 12 -> 4 (cost 0.125)"]
    assert [r.inner[0].page_size for r in offers("finer_pages", cached(page_size=12))] == [6, 4, 3, 2]


def test_what_it_does_not_offer():
    assert families_of("finer_pages", page_size=8) == {"paged", "mla"}
    for page_size in (1, 2, 7):
        assert not offers("finer_pages", cached(page_size=page_size)), "no smaller page but a token"
    assert not offers("finer_pages", cached(kv_layout="HND")), "the tokens of a page are not one run of memory"
    assert not offers("finer_pages", cached(kv_parts=1)), "its parts are split first"


def test_only_the_columns_in_use_are_written():
    """A table for the longest sequence a model can have is not copied at every step."""
    seen = []
    target = Lowered(SMALL, "autograd")

    def load(request):
        bound = target.load(request)

        def forward(*tensors, tables, **given):
            seen.append(tuple(tables.page_table.shape))
            return bound.forward(*tensors, tables=tables, **given)

        return dataclasses.replace(bound, forward=forward)

    from polyattn.lowering import bind

    step = make(cached(dtype="float64"), LENGTHS, 0)
    wide = torch.nn.functional.pad(step.given["page_table"], (0, 500))
    bind(target.plan(step.request), load, load).forward(*step.tensors, **words({**step.given, "page_table": wide}))
    assert seen == [(3, 4)]
