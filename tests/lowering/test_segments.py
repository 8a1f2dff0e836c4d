"""`segments_as_sequences` and `segments_as_mask` against the reference: documents that share a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyattn.contract import AttentionRequest, Bound
from polyattn.lowering import get_lowering

from .harness import EXACT, GATES, cases, dense, exact, gates, offers, takes

MASKED = takes("dense", segments="")
PACKED = takes("varlen")
PLAIN = {"window": ((-1, -1),), "chunk": (0,), "alibi": (False,), "mask": ("none",), "tree": (False,)}


@EXACT
@given(
    st.one_of(
        cases(segments=("shared",), s_relation=("equal",), tree=(False,)),
        cases(segments=("pair",), tree=(False,)),
    )
)
def test_a_mask_gives_the_numbers_of_the_reference(case):
    exact(case, MASKED, ("segments_as_mask",), only=("segments_as_mask",))


@EXACT
@given(
    st.one_of(
        cases(segments=("shared",), s_relation=("equal",), **PLAIN),
        cases(segments=("pair",), causal=("none",), **PLAIN),
    )
)
def test_sequences_give_the_numbers_of_the_reference(case):
    exact(case, PACKED, ("segments_as_sequences",))


@GATES
@given(cases(dtype="bfloat16", head_dim=(64,), segments=("shared",), s_relation=("equal",), **PLAIN))
def test_gates_hold_in_half_precision(case):
    gates(case, PACKED, ("segments_as_sequences",))


@pytest.mark.parametrize("ids", [[[0, 0, 1], [5, 7, 7]], [[1, 0, 1], [7, 5, 7]]], ids=("in order", "mixed"))
def test_tokens_that_are_in_order_are_not_moved(ids):
    seen = []

    def kernel(query, key, value, **given):
        seen.append((query, given))
        return query

    request = dense(segments="shared").normalised()
    (rewrite,) = offers("segments_as_sequences", request)
    query, segments = torch.randn(2, 3, 4, 64), torch.tensor(ids, dtype=torch.int32)
    run = get_lowering("segments_as_sequences").bind(request, rewrite, [Bound(kernel)], []).forward
    assert torch.equal(run(query, query, query, q_segments=segments, k_segments=segments), query)
    packed, given = seen[0]
    assert (packed.data_ptr() == query.data_ptr()) == (ids[0] == [0, 0, 1])
    assert given["cu_seqlens_q"] is given["cu_seqlens_k"]
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (2, 2)
    assert given["cu_seqlens_q"].diff().tolist() == ([2, 1, 1, 2] if ids[0] == [0, 0, 1] else [1, 2, 1, 2])


def test_a_number_that_one_side_lacks_is_a_sequence_all_the_same():
    seen = []
    kernel = Bound(lambda query, key, value, **given: seen.append(given) or query)
    request = dense(segments="pair", s_relation="fewer").normalised()
    (rewrite,) = offers("segments_as_sequences", request)
    queries, keys = (torch.tensor(ids, dtype=torch.int32) for ids in ([[3, 1]], [[2, 1, 2]]))
    query, key = torch.randn(1, 2, 4, 64), torch.randn(1, 3, 4, 64)
    run = get_lowering("segments_as_sequences").bind(request, rewrite, [kernel], []).forward
    run(query, key, key, q_segments=queries, k_segments=keys)
    assert seen[0]["cu_seqlens_q"].tolist() == [0, 1, 1, 2]
    assert seen[0]["cu_seqlens_k"].tolist() == [0, 1, 3, 3]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"segments": "shared", "window": (3, -1)},
        {"segments": "shared", "chunk": 4},
        {"segments": "shared", "alibi": True},
        {"segments": "shared", "mask": "bool"},
        {"segments": "pair", "causal": "bottom_right"},
        {"segments": "shared", "graph_capture": True},
        {"segments": "shared", "transform": "vmap"},
        {"segments": "shared", "zero_size": True},
    ],
)
def test_sequences_are_not_offered_beyond(fields):
    assert offers("segments_as_sequences", AttentionRequest(**fields)) == []
    masks = offers("segments_as_mask", AttentionRequest(**fields))
    assert len(masks) == (fields.get("segments", "") != "" and "transform" not in fields)
