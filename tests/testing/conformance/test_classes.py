"""Kernels that quantise are held to the class that their provider declares, and to every other rule as all are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.contract import Accuracy, AttentionRequest
from polyattn.semantics import reference
from polyattn.testing import Case, controls, run_case

CLASS = Accuracy(0.998, 0.06)


class Rounded:
    """The reference, its output rounded to 127 steps of `size` times its largest number."""

    name, device = "rounded", torch.device("cpu")

    def __init__(self, size: float, accuracy: Accuracy | None = None) -> None:
        self.size, self.accuracy = size, accuracy

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        result = reference.attention(tensors["query"], tensors["key"], tensors["value"])
        step = self.size * result.abs().max() / 127
        return (result / step).round() * step


def case() -> Case:
    return Case(request=AttentionRequest(heads=2, kv_heads=2, head_dim=64), lengths=((64, 64),) * 2)


@pytest.mark.parametrize(
    ("size", "accuracy", "verdict"),
    [(4, None, "failed"), (4, CLASS, "passed"), (60, CLASS, "failed"), (60, Accuracy(0.5, 0.9), "passed")],
)
def test_a_class_takes_the_place_of_the_gates(size: float, accuracy: Accuracy | None, verdict: str) -> None:
    outcome = run_case(Rounded(size, accuracy), case())
    assert outcome.verdict == verdict, str(outcome)
    assert accuracy is None or verdict == "passed" or "its class is at most 0.06 and at least 0.998" in str(outcome)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_no_class_forgives_what_is_not_finite(wrong: float) -> None:
    class Poisoned(Rounded):
        def call(self, *args: Any) -> Any:
            result = super().call(*args)
            result[0, 3] = wrong
            return result

    assert "not finite" in str(run_case(Poisoned(1, Accuracy(0.1, 10.0)), case()))


@pytest.mark.parametrize("accuracy", [CLASS, Accuracy(0.98, 0.2)])
def test_controls_of_a_class(accuracy: Accuracy) -> None:
    found = controls(torch.bfloat16, torch.device("cpu"), accuracy)
    assert [control.name for control in found if control.held] == [control.name for control in found]
    loose = controls(torch.bfloat16, torch.device("cpu"), Accuracy(-1.0, 100.0))
    assert [control.name for control in loose if control.held] == ["its class: the right result", "its class: zeros"]
