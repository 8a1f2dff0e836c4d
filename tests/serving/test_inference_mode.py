"""What is kept from step to step may be made in torch's inference mode and written outside of it, and the other way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.serving.graphs.graphs import FakeGraph, GraphRunner
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardMode
from polyattn.serving.step.tree import DraftTree

from .rig import Rig, decoder

EXTEND, DECODE, MIXED, VERIFY = (
    ForwardMode.EXTEND,
    ForwardMode.DECODE,
    ForwardMode.MIXED,
    ForwardMode.TARGET_VERIFY,
)
LAYERS = [AttentionLayer(i, 4, 2, 16, window=window) for i, window in enumerate((-1, 5))]
CASES: list[tuple[str, dict[str, str]]] = [
    ("torch_native", {}),
    ("torch_native", {"dtype": "fp8_e4m3", "scales": "token"}),
    ("torch_native", {"dtype": "fp4_e2m1", "layout": "HND"}),
    ("toy", {}),
    ("toy_saves", {"dtype": "fp8_e4m3"}),
]


@pytest.mark.slow(keep=14)
@pytest.mark.parametrize("name, config", CASES)
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_each_step_in_the_other_mode(first: int, name: str, config: dict[str, str], toys: Any) -> None:
    """Every second step is in inference mode, from step `first` on: each is once the one that makes something."""
    turns = iter([step >= first and (step - first) % 2 == 0 for step in range(7)])
    with torch.inference_mode(next(turns)):
        rig = Rig(LAYERS, config=config, backend=name, topk=2)
    a, b = rig.add(2)
    for mode, new in ((EXTEND, {a: 7, b: 3}), (DECODE, {a: 1, b: 1}), (MIXED, {a: 1, b: 9}), (DECODE, {a: 1, b: 1})):
        with torch.inference_mode(next(turns)):
            rig.step(mode, new)
    with torch.inference_mode(next(turns)):
        rig.step(VERIFY, {a: 3, b: 3}, tree=DraftTree.from_parents([[-1, 0, 0], [-1, 0, 1]]))
    with torch.inference_mode(next(turns)):
        rig.step(EXTEND, {a: 2, b: 20})  # more memory than before


@pytest.mark.parametrize("made", [True, False])
def test_a_runner(made: bool) -> None:
    def forward(input_ids: Tensor, positions: Tensor) -> Tensor:
        return input_ids * 2 + positions

    rig = Rig(decoder())
    (row,) = rig.add()
    with torch.inference_mode(made):
        options: dict[str, Any] = {"device": "cpu", "graph": FakeGraph, "planned_positions": True}
        runner = GraphRunner(rig.backend, forward, max_sequences=2, **options)
    for position, mode in enumerate((made, not made, made)):
        with torch.inference_mode(mode):
            rig.give({row: 1})
            assert int(runner.run(rig.batch_of(DECODE, {row: 1}), torch.tensor([21]))) == 42 + position
