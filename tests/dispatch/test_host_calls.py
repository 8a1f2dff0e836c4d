"""How many functions a call goes through before its kernel. Times belong to benchmarks/dispatch.py; these counts are
the same on every machine, and what they bound is what the times are made of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import polyattn
from polyattn.nn import LocalAttention

MISS = 465
"""Functions of Python and C that the first call of a signature may go through, the binding of its kernel included. A
few of them depend on what the process did before."""


def functions(call: Callable[[], Any]) -> list[str]:
    """The functions that a call goes through, those of C included."""
    found: list[str] = []

    def note(frame: Any, event: str, function: Any) -> None:
        # Python 3.10 locks a module again whenever a function imports from it; later versions only look it up.
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return
        if event == "call":
            found.append(frame.f_code.co_name)
        elif event == "c_call":
            found.append(function.__name__)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found[1:-1]  # without `call` itself and the last setprofile


@pytest.fixture
def inputs():
    with torch.inference_mode():
        yield tuple(torch.randn(1, 8, 1, 64) for _ in range(3))


def test_a_call_that_was_seen_before(inputs):
    site, layer = polyattn.bind(layout="BHSD"), LocalAttention(layout="BHSD").eval()
    calls = {
        "bind": lambda: site(*inputs),
        "layer": lambda: layer.forward(*inputs),
        "functional": lambda: polyattn.attention(*inputs, layout="BHSD"),
    }
    for call in calls.values():
        for _ in range(4):
            call()
    own = ["is_dynamo_compiling", "check", "_get_deterministic_algorithms", "scaled_dot_product_attention"]
    found = {name: functions(call) for name, call in calls.items()}
    assert found["bind"] == ["__call__", *own]
    assert found["layer"] == ["forward", "__call__", *own]
    assert found["functional"] == ["attention", own[0], "get", "get", "__call__", *own]


@pytest.mark.parametrize("one", [True, False])
def test_a_packed_call_that_was_seen_before_is_not_checked_word_by_word(one):
    query, key, value = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    lens = {"cu_seqlens_q": starts, "cu_seqlens_k": starts if one else starts.clone(), "max_seqlen_q": 4}

    def call() -> Any:
        return polyattn.varlen_attention(query, key, value, **lens, max_seqlen_k=4, scale=0.3 + one)

    with torch.inference_mode():
        seen = [functions(call).count("check_varlen") for _ in range(4)]
    assert seen == [1, 1, 0, 0]


def test_a_gpu_is_asked_where_three_tensors_are_and_whether_it_records(inputs, monkeypatch):
    site = polyattn.bind(layout="BHSD")
    for _ in range(4):
        site(*inputs)
    for name in ("cuda", "watch"):
        monkeypatch.setattr(site._fast, name, True)
    monkeypatch.setattr("polyattn.dispatch.dense.raw_stream", lambda index: len("stream"))
    monkeypatch.setattr("polyattn.dispatch.dense.recording", torch.is_grad_enabled)
    asked = ["<lambda>", "len", "is_grad_enabled"]
    watched = ["check", "unmoved", *["data_ptr"] * 3, *asked, "_get_deterministic_algorithms"]
    found = functions(lambda: site(*inputs))
    assert found == ["__call__", "is_dynamo_compiling", *watched, "scaled_dot_product_attention"]


def test_the_first_call_of_a_signature(inputs):
    for width in (24, 40):
        polyattn.attention(*(t[..., :width].contiguous() for t in inputs), layout="BHSD")
    lengths = []
    for width in (32, 48, 56):  # a table that grows, or an object collected just then, costs a few more once
        new = [t[..., :width].contiguous() for t in inputs]
        found = functions(lambda new=new: polyattn.attention(*new, layout="BHSD"))
        assert "load_forward" in found, "it was no new signature"
        lengths.append(len(found))
    assert min(lengths) <= MISS
