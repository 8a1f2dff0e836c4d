"""`chunk_as_batch` against the reference: blocks of positions as samples of their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyattn.contract import AttentionRequest, Bound
from polyattn.lowering import get_lowering

from .harness import EXACT, GATES, cases, dense, exact, gates, offers, takes

ROWS = takes("dense", chunk=0)
ASKED = {"chunk": (16, 1, 40, 200), "mask": ("none",), "tree": (False,), "segments": ("",)}


@EXACT
@given(st.one_of(cases(s_relation=("equal",), **ASKED), cases(s_relation=("one",), causal=("none",), **ASKED)))
def test_numbers_are_those_of_the_reference(case):
    exact(case, ROWS, ("chunk_as_batch",))


@GATES
@given(cases(dtype="bfloat16", head_dim=(64,), s_relation=("equal",), **ASKED))
def test_gates_hold_in_half_precision(case):
    gates(case, ROWS, ("chunk_as_batch",))


def test_blocks_of_bshd_that_fit_are_views():
    seen = []

    def kernel(query, key, value):
        seen.append((query, key))
        return query

    request = dense(chunk=4).normalised()
    (rewrite,) = offers("chunk_as_batch", request)
    query = torch.randn(2, 12, 4, 64)
    get_lowering("chunk_as_batch").bind(request, rewrite, [Bound(kernel)], []).forward(query, query, query)
    assert seen[0][0].shape == (6, 4, 4, 64)
    assert seen[0][0].data_ptr() == query.data_ptr()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"chunk": 4, "mask": "bool"},
        {"chunk": 4, "segments": "shared"},
        {"chunk": 4, "s_relation": "fewer"},
        {"chunk": 4, "s_relation": "one", "causal": "top_left"},
        {"chunk": 4, "zero_size": True},
        {"chunk": 4, "transform": "vmap"},
        {"chunk": 4, "family": "varlen"},
    ],
)
def test_it_offers_nothing_beyond(fields):
    assert offers("chunk_as_batch", AttentionRequest(**fields)) == []
