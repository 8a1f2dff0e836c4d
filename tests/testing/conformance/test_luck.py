"""An error on few numbers that exceeds its allowance a little is measured again on more of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor

from polyattn.contract import AttentionRequest
from polyattn.testing import Case, run_case
from polyattn.testing.checks import CLEAR
from polyattn.testing.fuzz import Calls

CASE = Case(
    request=AttentionRequest(family="varlen", dtype="float32", head_dim=8, v_head_dim=8, heads=2, kv_heads=2),
    lengths=((5, 5), (9, 9)),
)
Bend = Callable[[Tensor, int], Tensor]


class Bent(Calls):
    """The reference, its output bent with the number of sequences in view."""

    def __init__(self, bend: Bend) -> None:
        super().__init__("reference", "cpu")
        self.bend, self.batches = bend, []  # type: ignore[var-annotated]

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        self.batches.append(len(case.lengths))
        return self.bend(super().call(case, tensors, extra, out), len(case.lengths))


def lifted(by: float, least: int = 1, most: int = 100) -> Bend:
    """One element is off by this much where there are so many sequences."""

    def bend(out: Tensor, sequences: int) -> Tensor:
        if least <= sequences <= most:
            out = out.clone()
            out.view(-1)[3] += by
        return out

    return bend


def allowed() -> float:
    """The largest error that the first gate lets pass."""
    worst = run_case(Bent(lifted(1e-3)), CASE).findings[0]
    assert worst.allowed is not None
    return worst.allowed


def test_a_result_within_its_allowance_is_measured_once() -> None:
    target = Bent(lifted(0.0))
    assert run_case(target, CASE).verdict == "passed"
    assert target.batches == [2]


def test_a_little_too_much_on_few_numbers_alone_is_luck() -> None:
    target = Bent(lifted(4 * allowed(), most=2))
    outcome = run_case(target, CASE)
    assert outcome.verdict == "passed"
    assert outcome.case is CASE
    assert target.batches == [2, 16]


def test_a_little_too_much_on_more_numbers_too_is_wrong() -> None:
    target = Bent(lifted(8 * allowed()))
    outcome = run_case(target, CASE)
    assert outcome.verdict == "failed"
    assert 1 < outcome.findings[0].excess < CLEAR
    assert target.batches == [2, 16]


def test_far_too_much_is_wrong_however_few() -> None:
    target = Bent(lifted(2 * CLEAR * allowed(), most=2))
    outcome = run_case(target, CASE)
    assert outcome.verdict == "failed"
    assert outcome.findings[0].excess > CLEAR
    assert target.batches == [2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_wrong_however_few(value: float) -> None:
    target = Bent(lifted(value, most=2))
    outcome = run_case(target, CASE)
    assert outcome.verdict == "failed"
    assert outcome.findings[0].excess == float("inf")
    assert target.batches == [2]


def test_an_exception_is_not_tried_again() -> None:
    def bend(out: Tensor, sequences: int) -> Tensor:
        raise RuntimeError(f"{sequences} sequences")

    target = Bent(bend)
    assert "2 sequences" in str(run_case(target, CASE))
    assert target.batches == [2]
