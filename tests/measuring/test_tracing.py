"""Recording what a program asks for: nothing where nobody records, everything where somebody does."""

from __future__ import annotations

import json
import os
import types

import pytest
import torch

import polyattn
from polyattn import tracing
from polyattn.contract import Bound
from polyattn.measuring.traces import read_trace
from polyattn.records import AttentionRequest

DECODE = AttentionRequest(
    family="paged", layout="THD", phase="decode", s_relation="one", page_size=16, dtype="float32", graph_capture=True
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    tracing.record_to(path)
    yield path
    tracing.stop()


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_off_it_is_not_there(trace):
    tracing.stop()
    bound = Bound(lambda *tensors: tensors)
    assert not tracing.recording()
    assert tracing.observed(bound, DECODE, "x") is bound
    assert tracing.opaque(bound) is bound


def test_calls_are_counted_by_request_and_bucket(trace):
    for length in (5, 8, 9, 6):
        polyattn.attention(*torch.randn(3, 2, length, 1, 8))
    polyattn.attention(*torch.randn(3, 2, 5, 1, 8), causal=True, backend="reference")
    tracing.stop()
    found = {(one.workload.request.causal, one.workload.lengths[0][0]): one for one in read_trace([trace])}
    assert {key: (one.count, one.backend) for key, one in found.items()} == {
        ("none", 5): (3, "torch_sdpa@cpu"),
        ("none", 9): (1, "torch_sdpa@cpu"),
        ("bottom_right", 5): (1, "reference@cpu"),
    }
    assert {len(one.workload.lengths) for one in found.values()} == {2}
    polyattn.attention(*torch.randn(3, 2, 70, 1, 8))
    assert len(read_trace([trace])) == 3, "nobody records any more"


def test_two_processes_add_to_one_file(trace):
    polyattn.attention(*torch.randn(3, 2, 5, 1, 8))
    if hasattr(os, "fork"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tracing, "_recorder", tracing._recorder)
            tracing._forked()
            assert tracing._recorder._entries == {}, "what the parent recorded is the parent's"
    polyattn.attention(*torch.randn(3, 2, 5, 1, 8))
    tracing.stop()
    tracing.record_to(trace)
    polyattn.attention(*torch.randn(3, 2, 5, 1, 8))
    tracing.stop()
    assert len(trace.read_text().splitlines()) == 2
    assert [one.count for one in read_trace([trace])] == [2]
    assert [one.count for one in read_trace([trace, trace])] == [4]


def test_a_step_that_is_planned_is_recorded_once_for_all_layers(trace):
    """What an engine runs is a session; graphs replay it without any Python, so the plan is what is counted."""
    calls = []
    session = types.SimpleNamespace(plan=calls.append, prepare=calls.append, forward=lambda *tensors: "out")
    bound = tracing.observed(Bound(lambda *tensors: None, session=lambda slot: session), DECODE, "triton@cuda")
    assert bound.simple is None
    lens = {"cu_seqlens_q": ints(0, 1, 2, 3), "seq_lens": ints(20, 0, 300)}
    step = types.SimpleNamespace(sequences=3, max_seqlen_q=1, max_seqlen_k=512, host=lens.__getitem__)
    made = bound.session(None)
    for _ in range(2):
        made.plan(step)
        made.prepare(step)
        assert made.forward("q") == made.forward("q") == "out"
    tracing.stop()
    assert calls == [step] * 4
    (line,) = map(json.loads, trace.read_text().splitlines())
    assert line["lengths"] == [[1, 20], [1, 300]], "padding is nobody's"
    assert (line["count"], line["backend"]) == (2, "triton@cuda")
    assert "graph_capture" not in line["request"]


def test_a_shared_prefix_and_unknown_lengths():
    part = types.SimpleNamespace(max_seqlen_k=48)
    tables = {"cu_seqlens_q": ints(0, 2, 3), "seq_lens": ints(9, 4), "kv_parts": (part,)}
    assert tracing.lengths_of((2, 2, 9), tables) == ([(2, 9), (1, 4)], 48)
    assert tracing.lengths_of((2, 7, 9), {}) == ([(7, 9)] * 2, 0)
    empty = {"cu_seqlens_q": ints(0, 0), "seq_lens": ints(0)}
    assert tracing.lengths_of((1, 1, 5), empty) == ([(1, 5)], 0)


def test_compiled_code_is_recorded_through_an_op(trace):
    bound = Bound(lambda *tensors: None, traceable=True)
    assert tracing.opaque(bound).traceable is False
    tracing.stop()
    assert tracing.opaque(bound).traceable is True
