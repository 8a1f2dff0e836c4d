"""`batch_invariant`, from an argument of a call to an engine: the same bits whatever is served beside a request."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

import pytest
import torch

import polyattn
from polyattn.backends.paged_torch_native import PagedTorchNative
from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.nn import LocalAttention
from polyattn.serving.engine import Engine, EngineConfig, Speculative, engine
from polyattn.serving.engine.scheduler import Scheduler
from polyattn.serving.layer import Keep, StateLayer
from polyattn.serving.step.batch import ForwardMode

from .rig import Rig, decoder
from .schedules import run_schedules
from .toy_model import ToyRunner

EXTEND, MIXED = ForwardMode.EXTEND, ForwardMode.MIXED


def test_no_bit_differs_whatever_the_schedule(pytestconfig: pytest.Config) -> None:
    seen = run_schedules(1000 if pytestconfig.getoption("--polyattn-full") else 40)
    assert not seen.differ, (len(seen.differ), seen.differ[0])
    assert min(seen.again, seen.mixed, seen.cut) > 100, seen
    assert seen.preempted > 5, seen


@pytest.mark.skipif(importlib.util.find_spec("polyattn_triton") is None, reason="polyattn-triton is not installed")
def test_no_bit_differs_in_our_own_kernels() -> None:
    seen = run_schedules(2, backend="triton")
    assert not seen.differ, seen
    assert seen.again > 50, seen


def _as_the_batch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = PagedTorchNative.bind
    monkeypatch.setattr(
        PagedTorchNative, "bind", lambda self, r: bind(self, dataclasses.replace(r, batch_invariant=False))
    )


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a kernel that looks at the batch": _as_the_batch_is,
    "prompts are cut as there is room": lambda patch: patch.setattr(engine, "_piece", lambda config: 0),
    "tokens are made anew together": lambda patch: patch.setattr(
        Scheduler, "_together", lambda self, request, start: min(self._piece, len(request.tokens) - start)
    ),
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("plant", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert run_schedules(40).differ


@torch.no_grad()
def test_rows_that_decode_run_apart_from_those_that_extend() -> None:
    rig = Rig(decoder(1), batch_invariant=True)
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 5, b: 5})
    rig.step(MIXED, {a: 1, b: 4})
    assert len(rig.backend._planned) == 2
    assert all(one.request.batch_invariant for one in rig.backend.explain().values())
    rig.give({a: 1, b: 3})
    with pytest.raises(InvalidInputError, match=r"batch_invariant.*run the rows that decode in a batch of their own"):
        rig.backend.plan(rig.batch_of(MIXED, {a: 1, b: 3}, padding=1, padding_query_len=1))


def test_an_engine_says_what_it_cannot_keep() -> None:
    model = ToyRunner()
    for more, words in (
        ({"batch_invariant": 1.5}, "batch_invariant=1.5"),
        ({"batch_invariant": True, "speculative": Speculative(ToyRunner(seed=1))}, "leave one of them out"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            Engine(model, EngineConfig(**more))
    model.layers = [*model.layers, StateLayer(2, [Keep("state", "request", (4, 4), "float32")])]
    with pytest.raises(InvalidInputError, match=r"layers that keep a state.*leave it out"):
        Engine(model, EngineConfig(batch_invariant=True))


CALLS = {
    "attention": lambda **more: polyattn.attention(*torch.ones(3, 1, 4, 2, 16), **more),
    "bind": lambda **more: polyattn.bind(**more)(*torch.ones(3, 1, 4, 2, 16)),
    "LocalAttention": lambda **more: LocalAttention(**more)(*torch.ones(3, 1, 4, 2, 16)),
    "varlen": lambda **more: polyattn.varlen_attention(
        *torch.ones(3, 4, 2, 16), cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, max_seqlen_q=2, max_seqlen_k=2, **more
    ),
}
STARTS = torch.tensor([0, 2, 4], dtype=torch.int32)
PAGES = {
    "page_table": torch.tensor([[0], [1]], dtype=torch.int32), "seq_lens": torch.tensor([2, 3], dtype=torch.int32),
    "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32), "max_seqlen_q": 1, "max_seqlen_k": 3,
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_asks_for_it_and_is_refused_with_the_reason(call: Callable[..., object]) -> None:
    call(batch_invariant=False)
    with pytest.raises(InvalidInputError, match=r"batch_invariant"):
        call(batch_invariant="yes")
    with pytest.raises(UnsupportedRequestError, match=r"batch_invariant"):
        call(batch_invariant=True, backend="torch_sdpa")


@torch.no_grad()
def test_calls_over_a_cache_ask_for_it() -> None:
    query, cache = torch.ones(2, 2, 16), torch.ones(2, 4, 2, 16)
    for more in ({}, {"batch_invariant": True}):
        found = polyattn.explain(polyattn.paged_attention, query, cache, cache, **PAGES, backend="torch_native", **more)
        assert found.request.batch_invariant is bool(more)
        latent = (torch.ones(2, 2, 24), torch.ones(2, 4, 24))
        more |= {"scale": 1.0, "v_head_dim": 16, "backend": "torch_native"}
        found = polyattn.explain(polyattn.mla_attention, *latent, **PAGES, **more)
        assert found.request.batch_invariant is more.get("batch_invariant", False)
    with pytest.raises(UnsupportedRequestError, match=r"batch_invariant"):
        polyattn.paged_attention(query, cache, cache, **PAGES, batch_invariant=True, backend="reference")
