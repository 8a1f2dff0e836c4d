"""Backends with a serving side of their own, which core's are not: they plan, and check that every plan is kept."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.contract import (
    AttentionRequest,
    BackendInfo,
    Bound,
    PagedTables,
    PairRule,
    Provider,
    Range,
    Slot,
    conditions,
    hookimpl,
    row,
)
from polyattn.registry.manager import PluginManager, reset_manager
from polyattn.semantics.reference import mla_attention, paged_attention


class Toy:
    """The reference with a session: each is numbered, writes its number into its workspace when a step is prepared, and
    finds it there in every layer unless somebody else was given the same memory."""

    made: ClassVar[list[ToySession]] = []

    def bind(self, request: AttentionRequest) -> Bound:
        def forward(query: Tensor, *caches: Tensor, **tables: Any) -> Any:
            return attend(request, query, *caches, **tables)

        def session(slot: Slot) -> ToySession:
            Toy.made.append(ToySession(request, slot, len(Toy.made)))
            return Toy.made[-1]

        return Bound(forward, session=session)


class ToySession:
    def __init__(self, request: AttentionRequest, slot: Slot, number: int) -> None:
        self.request, self.slot, self.number = request, slot, number
        self.plans = self.prepares = self.forwards = 0
        self.step: Any = None
        self.stamp = slot.workspace("stamp", 8).view(torch.int64)

    def plan(self, step: Any) -> None:
        self.plans += 1
        self.step = step
        assert step.sequences <= self.slot.max_sequences
        assert step.tokens <= self.slot.max_tokens
        assert step.page_table.shape[1] <= self.slot.max_pages

    def prepare(self, step: Any) -> None:
        assert step is self.step, "prepare is given the step of the plan"
        self.prepares += 1
        self.stamp.fill_(self.number)

    def forward(self, query: Tensor, *caches: Tensor, tables: PagedTables, **given: Any) -> Any:
        assert self.prepares, "a step is prepared before a layer runs"
        assert int(self.stamp) == self.number, "another session was given this workspace"
        for name in ("page_table", "seq_lens", "cu_seqlens_q"):
            assert torch.equal(getattr(tables, name), getattr(self.step, name)), name
        self.forwards += 1
        return attend(self.request, query, *caches, tables=tables, **given)


def attend(request: AttentionRequest, query: Tensor, *caches: Tensor, tables: PagedTables, **given: Any) -> Any:
    assert given.get("key") is None or request.save_kv_cache is not None, "rows that the request does not know of"
    options = {"causal": request.causal, "window": request.window, "scale": request.scale, "softcap": request.softcap}
    given |= {name: getattr(tables, name) for name in ("page_table", "seq_lens", "cu_seqlens_q")}
    if request.family == "mla":
        return mla_attention(query, *caches, v_head_dim=request.v_head_dim, **options, **given)
    saving = {"kv_layout": request.kv_layout, "save_kv_cache": bool(request.save_kv_cache)}
    return paged_attention(query, *caches, **saving, **options, **given)


def _rows(**more: Any) -> tuple[Any, ...]:
    common: dict[str, Any] = {
        "dtype": ("float32", "float64"),
        "head_dim": Range(1),
        "v_head_dim": Range(1),
        "group": True,
        "phase": ("extend", "decode"),
        "causal": ("none", "bottom_right"),
        "window": True,
        "scale": True,
        "softcap": True,
        "s_relation": ("equal", "one", "fewer", "more"),
        "page_size": Range(1),
        "cross": True,
        **more,
    }
    stored = {"kv_layout": ("", "NHD", "HND"), "kv_dtype": True, "kv_scales": ("", "tensor", "head"), "sinks": True}
    latent = {name: value for name, value in common.items() if name not in ("save_kv_cache", "softcap", "cross")}
    return row(family="paged", **stored, **common), row(family="mla", **latent)


DRAFTS = {"phase": ("extend", "decode", "verify"), "spec_topk": Range(0), "tree": True, "mask": ("none", "bool")}
CHAIN = {"phase": ("extend", "decode", "verify"), "spec_topk": Range(0, 1)}
NOT_FP8 = PairRule("prefill", "decode", ("toy",), "made for a test", conditions(kv_dtype="fp8_e4m3"))


def _info(name: str, rows: tuple[Any, ...], *pairs: PairRule) -> BackendInfo:
    provider = Provider("toy", rows, "polyattn_toy_plugin:Toy")
    return BackendInfo(name, "cpu", (provider,), summary="made for a test", priority=None, pairs=pairs)


INFOS = (
    _info("toy", _rows(**DRAFTS)),
    _info("toy_saves", _rows(**DRAFTS, save_kv_cache=True, graph_capture=True)),
    _info("toy_chain", _rows(**CHAIN)),
    _info("toy_plain", _rows(), NOT_FP8),
)
"""`toy` reads what the pool wrote; `toy_saves` writes itself and can be recorded; both verify trees. `toy_chain`
verifies chains, `toy_plain` nothing."""


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ToySession]]:
    """A manager that also has the backends of `INFOS`; yields the sessions made so far."""
    module: Any = types.ModuleType("polyattn_toy_plugin")
    module.Toy, module.POLYATTN_API_VERSION = Toy, 2

    @hookimpl
    def polyattn_register_backends() -> tuple[BackendInfo, ...]:
        return INFOS

    module.polyattn_register_backends = polyattn_register_backends
    monkeypatch.setitem(sys.modules, module.__name__, module)
    manager = PluginManager(environ={"POLYATTN_PLUGINS": "", "POLYATTN_EXTRA_PLUGINS": ""}).load()
    reset_manager(manager)
    manager.register(module, "toy")
    Toy.made = []
    yield Toy.made
    reset_manager()


@pytest.fixture
def settings() -> Iterator[Any]:
    """`polyattn.configure`, undone after the test."""
    yield polyattn.configure
    polyattn.configure()


@pytest.fixture
def gpu(device: Any) -> None:
    """For tests that record into CUDA graphs; without the device they are reported as not run."""
    device("cuda", what="device graphs of serving steps")
