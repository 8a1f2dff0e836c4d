"""`expand_gqa_heads` against the reference: grouped heads by kernels of one K and V head per query head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from polyattn.contract import Bound
from polyattn.errors import UnsupportedRequestError
from polyattn.lowering.expand_gqa_heads import ExpandGQAHeads

from .harness import EXACT, GATES, cases, dense, exact, families_of, gates, of_families, offers, takes

ROWS = takes(("dense", "varlen"), group=1)


@EXACT
@given(of_families("dense", "varlen", group=(2, 3, 4), kv_heads=(1, 2, 3)))
def test_numbers_are_those_of_the_reference(case):
    exact(case, ROWS, ("expand_gqa_heads",))


@GATES
@given(cases(dtype="bfloat16", head_dim=(64,), group=(4, 8), kv_heads=(1, 2)))
def test_gates_hold_in_half_precision(case):
    gates(case, ROWS, ("expand_gqa_heads",))


@pytest.mark.parametrize("layout, axis", [("BSHD", 2), ("BHSD", 1)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_one_key_head_is_given_to_all_by_a_view(layout, axis, kv_heads):
    seen = []
    request = dense(layout=layout, heads=4, kv_heads=kv_heads, head_dim=8).normalised()
    (rewrite,) = offers("expand_gqa_heads", request)
    shape = [2, 5, 5, 8]
    shape[axis] = kv_heads
    key = torch.randn(shape)
    kernel = Bound(lambda *tensors: seen.extend(tensors))
    ExpandGQAHeads().bind(request, rewrite, [kernel], []).forward(key, key, key)
    assert torch.equal(seen[1], key.repeat_interleave(4 // kv_heads, axis))
    assert (seen[1].data_ptr() == key.data_ptr()) == (kv_heads == 1)


def test_gradients_of_a_group_are_summed_in_float32():
    """256 + 7 * 1 in bfloat16 is 256 as long as each sum is rounded; it is 263, which is stored as 264."""
    request = dense(dtype="bfloat16", heads=8, kv_heads=1, head_dim=8, grad=("key",)).normalised()
    (rewrite,) = offers("expand_gqa_heads", request)
    grad = torch.ones(1, 1, 8, 8, dtype=torch.bfloat16)
    grad[:, :, 0] = 256
    kernel = Bound(lambda *tensors: None, lambda *tensors: (grad, grad, grad))
    query, key = torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    bound = ExpandGQAHeads().bind(request, rewrite, [kernel], [])
    _, dk, dv = bound.backward(query, query, key, key, query, torch.zeros(1, 1, 8))
    assert dk.shape == key.shape
    assert dk.dtype == torch.bfloat16
    assert bool((dk == 264).all())
    assert bool((dv == 264).all())


def test_what_it_offers():
    (rewrite,) = offers("expand_gqa_heads", dense(heads=8, kv_heads=2))
    assert (rewrite.inner[0].kv_heads, rewrite.cost) == (8, 4.0)
    (rewrite,) = offers("expand_gqa_heads", dense(heads=8, kv_heads=1))
    assert (rewrite.inner[0].kv_heads, rewrite.cost) == (8, 0.0), "a view"
    (rewrite,) = offers("expand_gqa_heads", dense(heads=8, kv_heads=1, dtype="bfloat16", head_dim=20))
    assert rewrite.inner[0].misaligned, "an expanded view of odd rows"
    assert offers("expand_gqa_heads", dense()) == []
    assert families_of("expand_gqa_heads", kv_heads=2) == {"dense", "varlen"}


def test_heads_that_become_too_many_for_the_kernel_are_refused():
    request = dense(heads=8, kv_heads=2).normalised()
    (rewrite,) = offers("expand_gqa_heads", request)
    bound = ExpandGQAHeads().bind(request, rewrite, [Bound(lambda *tensors: None)], [])
    query, key = torch.empty(1, 1, 8, 64, device="meta"), torch.empty(1, 2**23, 2, 64, device="meta")
    with pytest.raises(UnsupportedRequestError, match="repeating key heads makes a tensor of 4294967296 elements"):
        bound.forward(query, key, key)
