"""`pad_head_dim` against the reference: odd widths of Q and K by kernels of a few."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from polyattn.contract import Bound, Range
from polyattn.errors import UnsupportedRequestError
from polyattn.lowering import bind

from .harness import EXACT, GATES, Lowered, cases, dense, exact, families_of, gates, kernel, of_families, offers, takes

ROWS = takes(("dense", "varlen"), head_dim=(32, 64))
NARROW = {"head_dim": (8, 3, 17, 1), "kv_heads": (1, 2, 3)}


@EXACT
@given(of_families("dense", "varlen", dropout=(0.0,), **NARROW))
def test_numbers_are_those_of_the_reference(case):
    exact(case, ROWS, ("pad_head_dim",))


@GATES
@given(cases(dtype="bfloat16", head_dim=(40, 72), v_head_dim=(0, 64)))
def test_gates_hold_in_half_precision(case):
    gates(case, takes(head_dim=Range(64, 256, multiple_of=64)), ("pad_head_dim",))


def test_the_narrowest_width_that_the_kernel_takes_is_padded_to():
    plan = Lowered(takes(head_dim=Range(64, 256, multiple_of=64)), "autograd").plan(dense(head_dim=40))
    assert plan.lines() == ["pad_head_dim: D 40 -> 64 (cost 6.4)"]
    plan = Lowered(takes(head_dim=Range(8, 256, multiple_of=8)), "autograd").plan(dense(head_dim=41))
    assert plan.rewrite.inner[0].head_dim == 48


def test_the_scale_stays_that_of_the_width_as_given():
    assert {rewrite.inner[0].scale for rewrite in offers("pad_head_dim", dense(head_dim=40))} == {40**-0.5}
    assert {rewrite.inner[0].scale for rewrite in offers("pad_head_dim", dense(head_dim=40, scale=0.3))} == {0.3}


def test_queries_and_keys_narrower_than_values_are_padded_to_their_width():
    widths = [rewrite.inner[0].dims for rewrite in offers("pad_head_dim", dense(head_dim=40, v_head_dim=72))]
    assert (72, 72) in widths
    assert {d_v for _, d_v in widths} == {72}
    plan = Lowered(takes(v_head_dim=False), "autograd").plan(dense(head_dim=40, v_head_dim=72))
    assert plan.names == ("pad_head_dim",)


def test_it_offers_nothing_to_calls_over_a_cache():
    assert families_of("pad_head_dim", head_dim=40) == {"dense", "varlen"}


def test_the_last_axis_stays_dense():
    """torch pads in the order of axes that it finds, and with D = 1 that may be any."""
    request = dense(head_dim=1, heads=5, kv_heads=5)
    odd = torch.randn(2, 3, 5, 1).to(memory_format=torch.channels_last)
    assert odd.stride() == (15, 1, 3, 3)
    seen = []
    bound = bind(
        Lowered(ROWS, "autograd").plan(request), lambda inner: Bound(lambda *t: seen.extend(t)), kernel("autograd")
    )
    bound.forward(odd, odd, odd)
    for padded in seen[:2]:
        assert padded.is_contiguous()
        assert torch.equal(padded[..., :1], odd)
        assert not padded[..., 1:].any()


@pytest.mark.parametrize("large", [False, True])
def test_a_tensor_that_becomes_too_large_for_the_kernel_is_refused(large):
    """2**30 elements of 40 columns are 1.7 * 2**30 of 64: sizes are not known when the kernel is chosen."""
    request = dense(head_dim=40, large=large)
    plan = Lowered(ROWS, "autograd").plan(request)
    huge = torch.empty(1, 2**27, 8, 40, device="meta")
    bound = bind(plan, lambda inner: dataclasses.replace(kernel("autograd")(inner), forward=lambda *t, **kw: t), None)
    if large:
        assert bound.forward(huge, huge, huge) is not None
    else:
        with pytest.raises(UnsupportedRequestError, match="padding 40 columns to 64 makes a tensor of 68719476736"):
            bound.forward(huge, huge, huge)
