"""`pack_sequences` against the reference: dense batches by kernels for packed sequences."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from polyattn.contract import Bound
from polyattn.lowering.pack_sequences import PackSequences

from .harness import EXACT, GATES, cases, dense, exact, families_of, gates, offers, takes

NAMES = ("pack_sequences",)
ROWS = takes("varlen")
EMPTY = {"dense": {"equal": ((0, 0),), "fewer": ((0, 3),), "more": ((3, 0),), "one": ((1, 0),)}}


@EXACT
@given(cases(batch=(1, 2)))
def test_dense_by_a_packed_kernel(case):
    exact(case, ROWS, NAMES)


@settings(EXACT, max_examples=20)
@given(cases(lengths=EMPTY))
def test_empty_tensors(case):
    exact(dataclasses.replace(case, request=dataclasses.replace(case.request, zero_size=True)), ROWS, NAMES)


@settings(GATES, max_examples=8)
@given(cases(dtype="bfloat16", head_dim=(64,)))
def test_gates_hold_in_half_precision(case):
    gates(case, ROWS, NAMES)


def packed(request, query, key):
    """What a kernel gets."""
    got = {}

    def forward(*tensors, **given):
        got.update(given, tensors=tensors)
        return tensors[0]

    (rewrite,) = offers("pack_sequences", request)
    out = PackSequences().bind(request.normalised(), rewrite, [Bound(forward)], []).forward(query, key, key)
    assert out.shape == query.shape
    return got


def test_contiguous_bshd_tensors_are_viewed():
    query, key = torch.randn(3, 5, 4, 64), torch.randn(3, 7, 4, 64)
    got = packed(dense(s_relation="fewer"), query, key)
    assert [t.data_ptr() for t in got["tensors"]] == [query.data_ptr(), key.data_ptr(), key.data_ptr()]
    assert got["cu_seqlens_q"].tolist() == [0, 5, 10, 15]
    assert got["cu_seqlens_k"].tolist() == [0, 7, 14, 21]
    assert got["cu_seqlens_q"].dtype == torch.int32
    assert (got["max_seqlen_q"], got["max_seqlen_k"]) == (5, 7)


def test_equal_lengths_are_said_by_one_tensor():
    query = torch.randn(3, 5, 4, 64)
    got = packed(dense(), query, query)
    assert got["cu_seqlens_q"] is got["cu_seqlens_k"]
    got = packed(dense(s_relation="more"), query, query[:, :3])
    assert got["cu_seqlens_q"] is not got["cu_seqlens_k"]


def test_lengths_are_made_on_the_device():
    """No value of a tensor is read: meta tensors have none."""
    with torch.device("meta"):
        query = torch.zeros(3, 4, 5, 64)
        assert packed(dense(layout="BHSD"), query, query)["cu_seqlens_q"].shape == (4,)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"transform": "subclass"}, id="subclass"),
        pytest.param({"tree": True, "mask": "bool"}, id="tree"),
    ],
)
def test_it_offers_nothing_for(fields):
    assert offers("pack_sequences", dense(**fields)) == []


def test_what_it_offers():
    (rewrite,) = offers("pack_sequences", dense())
    assert (rewrite.cost, rewrite.inner[0].layout, rewrite.inner[0].s_relation) == (0.5, "THD", "equal")
    (copied,) = offers("pack_sequences", dense(layout="BHSD", head_dim=9))
    assert copied.cost == 6.0
    assert copied.inner[0].misaligned, "a batch of one is viewed, heads apart"
    (mixed,) = offers("pack_sequences", dense(s_relation="fewer"))
    assert mixed.inner[0].s_relation == "more", "a packed call calls every mixture that"
    assert families_of("pack_sequences") == {"dense"}
