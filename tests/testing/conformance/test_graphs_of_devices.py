"""Captures on devices whose graphs are not torch.cuda's: by the device's own module of torch, or said not to be run."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyattn.testing import Installed, OffChip, generate, plan, run, run_case
from polyattn.testing.machine import records_graphs, versions

from .conftest import Acme

CUDA = OffChip("torch_sdpa", "cuda")


class Recorder(types.SimpleNamespace):
    """A module such as torch.xpu, whose graphs are of CPU tensors: a replay calls again and writes where it wrote."""

    def __init__(self, *, replays: bool) -> None:
        super().__init__(Stream=lambda device: self, stream=lambda stream: contextlib.nullcontext())
        self.current_stream = lambda device: types.SimpleNamespace(wait_stream=lambda other: None)
        self.wait_stream = lambda other: None
        self.again: Callable[[], Any] | None = None
        self.made: Any = None
        self.recording = False
        self.CPUGraph = lambda: types.SimpleNamespace(replay=self.replay if replays else lambda: None)

    @contextlib.contextmanager
    def graph(self, graph: object) -> Any:
        self.recording = True
        yield
        self.recording = False

    def replay(self) -> None:
        assert self.again is not None
        self.made.copy_(self.again())


@pytest.mark.parametrize("replays", [True, False])
def test_the_graph_is_that_of_the_device(replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = generate(CUDA.rows, CUDA.facts, families=("dense",), dtypes=("float32",), per_row=40)
    case = next(c for c in made if c.check == "capture" and not c.request.lse and not c.out)
    module = Recorder(replays=replays)
    called = type(CUDA).call

    def call(self: Any, *words: Any) -> Any:
        result = called(self, *words)
        if module.recording:
            module.made, module.again = result, lambda: called(self, *words)
        return result

    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(OffChip, "call", call)
    assert records_graphs(torch.device("cpu"))
    outcome = run_case(CUDA, case)
    assert outcome.verdict == ("passed" if replays else "failed"), str(outcome)


def test_a_device_without_graphs_is_said(acme: Acme) -> None:
    acme(
        behind="""
        ROWS = (row(family="dense", dtype="float32", head_dim=Range(8, 128, multiple_of=8), graph_capture=True),)
        """
    )
    assert not [case for case in plan(Installed("acme")) if case.check == "capture"]
    assert "graph_capture: torch.cpu records no graphs here" in run("acme", only=()).not_run


def test_versions_of_a_device_that_is_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "npu", "8.3", raising=False)
    monkeypatch.setattr("polyattn.testing.machine._installed", lambda name: f"{name} 1")
    found = versions(types.SimpleNamespace(type="npu"))  # type: ignore[arg-type]
    assert (found["npu"], found["torch-npu"]) == ("8.3", "torch-npu 1")
