"""Chains on a CUDA device: right, recorded into a CUDA graph, and trained, over torch's flash op behind narrow rows."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import polyattn
from polyattn.backends.torch_sdpa import TorchSDPA
from polyattn.contract import BackendInfo, DeviceReport, Provider, hookimpl, row
from polyattn.registry.manager import PluginManager, reset_manager

ROWS = (
    row(
        family="dense",
        dtype="bfloat16",
        layout="BHSD",
        dims=((64, 64),),
        causal=("none", "bottom_right"),
        s_relation="equal",
        scale=True,
        lse=True,
        grad=("query", "key", "value", "lse"),
        graph_capture=True,
    ),
)
"""One layout, one head dim, no grouped heads, no sinks, square calls only."""

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped heads of 40": ({"heads": 8, "kv_heads": 2, "D": 40}, {"causal": True}),
    "sinks": ({}, {"causal": True, "sinks": True}),
    "sinks, lse, narrow values": ({"D_v": 24}, {"sinks": True, "return_lse": True}),
    "top left": ({"S_q": 100, "S_k": 300}, {"causal": "top_left"}),
    "more queries than keys": ({"S_q": 300, "S_k": 200, "D": 56}, {"causal": True, "return_lse": True}),
}
"""Shapes and options of calls that no row takes."""


@pytest.fixture(autouse=True)
def narrow(device: Callable[..., DeviceReport], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    device("cuda", what="rewrites on a GPU")
    module = types.ModuleType("polyattn_narrow_plugin")
    module.Narrow = TorchSDPA  # type: ignore[attr-defined]
    provider = Provider("narrow", ROWS, "polyattn_narrow_plugin:Narrow")

    @hookimpl
    def polyattn_register_backends() -> Any:
        return [BackendInfo("narrow", "cuda", (provider,), summary="torch's flash op, a little of it", priority=None)]

    module.polyattn_register_backends = polyattn_register_backends  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    manager = PluginManager(environ={"POLYATTN_PLUGINS": "", "POLYATTN_EXTRA_PLUGINS": ""}).load()
    reset_manager(manager)
    manager.register(module, "narrow")
    yield
    reset_manager()


def made(name: str, grad: bool = False) -> tuple[list[torch.Tensor], dict[str, Any]]:
    shape, options = CALLS[name]
    s = {"S_q": 256, "S_k": 256, "heads": 4, "kv_heads": 4, "D": 64, **shape}
    s.setdefault("D_v", s["D"])
    sizes = ((s["S_q"], s["heads"], s["D"]), (s["S_k"], s["kv_heads"], s["D"]), (s["S_k"], s["kv_heads"], s["D_v"]))
    torch.manual_seed(0)
    tensors = [torch.randn(2, *size, device="cuda", dtype=torch.bfloat16).requires_grad_(grad) for size in sizes]
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.randn(s["heads"], device="cuda")
    return tensors, options


def first(result: Any) -> torch.Tensor:
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def near(found: torch.Tensor, right: torch.Tensor) -> None:
    found, right = found.detach().double(), right.detach().double()
    assert float((found - right).norm() / right.norm()) < 8e-3


@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_chain_gives_what_the_inputs_at_replay_give(name: str) -> None:
    tensors, options = made(name)
    assert polyattn.explain(polyattn.attention, *tensors, backend="narrow", **options).lowerings
    given = [t.clone().zero_() for t in tensors]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            polyattn.attention(*given, backend="narrow", **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = first(polyattn.attention(*given, backend="narrow", **options))
    for mine, right in zip(given, tensors, strict=True):
        mine.copy_(right)
    graph.replay()
    near(out, first(polyattn.attention(*(t.double() for t in tensors), backend="reference", **options)))


@pytest.mark.parametrize("name", CALLS)
def test_it_trains(name: str) -> None:
    tensors, options = made(name, grad=True)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    out = first(polyattn.attention(*tensors, backend="narrow", **options))
    right = first(polyattn.attention(*wide, backend="reference", **options))
    near(out, right)
    upstream = torch.randn_like(right)
    grads = torch.autograd.grad(out, tensors, upstream.to(out.dtype))
    expected = torch.autograd.grad(right, wide, upstream)
    for grad, want in zip(grads, expected, strict=True):
        assert float((grad.double() - want).norm() / want.norm()) < 1.6e-2
