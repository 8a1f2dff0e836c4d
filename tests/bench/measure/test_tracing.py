"""Recording what a program asks for: nothing where nobody records, everything where somebody does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
import warnings

import pytest
import torch

import polyattn
from polyattn.bench.measure.traces import read_trace
from polyattn.contract import AttentionRequest, Bound
from polyattn.dispatch import trace_requests as tracing
from polyattn.epoch import bump
from polyattn.errors import ConfigError

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


def test_what_is_recorded_again_is_added(trace):
    for _ in range(3):
        polyattn.attention(*torch.randn(3, 2, 5, 1, 8))
    tracing.stop()
    tracing.record_to(trace)
    polyattn.attention(*torch.randn(3, 2, 5, 1, 8))
    tracing.stop()
    assert [one.count for one in read_trace([trace])] == [4]
    assert [one.count for one in read_trace([trace, trace])] == [8]


PROCESSES = """
import multiprocessing, os, signal
import torch, polyattn

def call(length):
    for _ in range(7):
        polyattn.attention(*torch.randn(3, 1, length, 1, 8))

if __name__ == "__main__":
    call(3)
    worker = multiprocessing.get_context("fork").Process(target=call, args=(30,))
    worker.start()
    worker.join()
    if not os.fork():
        call(300)
        os._exit(0)
    os.wait()
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="not run: processes are not forked on this platform")
def test_no_process_is_lost(tmp_path):
    """A worker is finished by multiprocessing and whole; of one that leaves at once, what is written as it goes."""
    path = tmp_path / "trace.jsonl"
    environ = {**os.environ, "POLYATTN_TRACE": str(path)}
    done = subprocess.run([sys.executable, "-c", PROCESSES], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert {one.workload.lengths[0][0]: one.count for one in read_trace([path])} == {3: 4, 30: 7, 300: 4}


def test_calls_after_the_first_seldom_write(trace, monkeypatch):
    added = []
    monkeypatch.setattr(os, "write", lambda handle, lines: added.append(json.loads(lines)["count"]))
    for _ in range(100):
        polyattn.attention(*torch.randn(3, 2, 5, 1, 8))
    tracing.stop()
    assert added == [1, 1, 2, 4, 8, 16, 32, 36]


def test_the_program_may_change_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracing.record_to("trace.jsonl")
    monkeypatch.chdir("/")
    polyattn.attention(*torch.randn(3, 2, 5, 1, 8))
    tracing.stop()
    assert [one.count for one in read_trace([tmp_path / "trace.jsonl"])] == [1]


def test_a_place_that_cannot_be_written_is_said_at_the_start(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=f"cannot be recorded to {tmp_path}: .*; name a file in a folder that is"):
        tracing.record_to(tmp_path)
    monkeypatch.setenv("POLYATTN_TRACE", str(tmp_path / "none" / "trace.jsonl"))
    with pytest.warns(RuntimeWarning, match=r"POLYATTN_TRACE: requests cannot .*\. Nothing is recorded") as said:
        tracing._begin()
    assert len(said) == 1
    assert not tracing.recording()


def test_a_file_that_is_gone_is_said_once(trace):
    trace.unlink()
    with pytest.warns(RuntimeWarning, match="cannot be written, so requests from here on are not recorded"):
        polyattn.attention(*torch.randn(3, 2, 5, 1, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        polyattn.attention(*torch.randn(3, 2, 50, 1, 8))
        tracing.stop()
    assert not trace.exists(), "what outlives the program that is traced begins no file of its own"


def test_a_call_without_keys_is_no_work(trace):
    q, cache = torch.randn(1, 2, 8), torch.randn(2, 16, 2, 8)
    polyattn.paged_attention(
        q, cache, cache, page_table=ints(1).view(1, 1), seq_lens=ints(0), cu_seqlens_q=ints(0, 1), max_seqlen_q=1,
        max_seqlen_k=0,
    )  # fmt: skip
    polyattn.attention(torch.randn(1, 4, 2, 8), *torch.randn(2, 1, 0, 2, 8))
    tracing.stop()
    assert trace.read_bytes() == b""


def test_who_serves_since_something_was_measured_is_recorded(trace):
    who = ["first"]
    bound = tracing.observed(Bound(lambda *tensors: tensors), AttentionRequest(dtype="float32"), lambda extent: who[0])
    tensors = torch.randn(3, 1, 4, 1, 128)
    bound.forward(*tensors)
    who[0] = "second"
    bound.forward(*tensors)
    bump()
    bound.forward(*tensors)
    tracing.stop()
    (one,) = read_trace([trace])
    assert (one.count, one.backend) == (3, "second")


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
    (one,) = read_trace([trace])
    assert one.workload.lengths == ((1, 20), (1, 300)), "padding is nobody's"
    assert (one.count, one.backend) == (2, "triton@cuda")
    assert not one.workload.request.graph_capture


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
