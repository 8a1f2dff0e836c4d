"""The gates reject what is wrong and pass what is right, in every dtype; messages say which gate and by how much."""

from __future__ import annotations

import functools

import pytest
import torch

from polyattn.testing import RELATIVE_L2, Control, check, controls
from polyattn.testing.tolerances import compare, measure

DTYPES = tuple(RELATIVE_L2)
FAULTS = (
    "zeros",
    "one 64-key block dropped",
    "scale off by 2 %",
    "map shifted by one block",
    "LSE in log2",
    "LSE with the sink in it",
    "gradient of query, merged with detached LSEs",
    "gradient of key, merged with detached LSEs",
)
RIGHT = (
    "the right result",
    "the right LSE",
    "gradient of query, merged with attached LSEs",
    "gradient of key, merged with attached LSEs",
)


@functools.cache
def run_controls(dtype: torch.dtype) -> dict[str, Control]:
    return {control.name: control for control in controls(dtype, torch.device("cpu"))}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAULTS)
def test_each_gate_rejects(name: str, dtype: torch.dtype) -> None:
    control = run_controls(dtype)[name]
    assert control.fault
    gates = ("relative",) if dtype == torch.float64 else ("rule", "relative")
    assert control.rejected_by == gates, control
    assert control.held


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_no_gate_rejects(name: str, dtype: torch.dtype) -> None:
    control = run_controls(dtype)[name]
    assert not control.fault
    assert control.rejected_by == ()
    assert control.held


def test_all_controls_are_tested() -> None:
    assert set(run_controls(torch.float32)) == {*FAULTS, *RIGHT}


def test_a_control_must_be_caught_by_every_gate() -> None:
    right = torch.tensor([1.0, 100.0]).double()
    caught_once = measure(right + torch.tensor([0.02, 0.0]), right, right, torch.float32)
    assert Control("half caught", caught_once).rejected_by == ("rule", "relative")
    lenient = measure(right + torch.tensor([0.02, 0.0]), right, right + 1, torch.float32)
    assert Control("half caught", lenient).rejected_by == ("relative",)
    assert not Control("half caught", lenient).held
    assert not Control("right, and rejected", lenient, fault=False).held


RIGHT_OUT = torch.linspace(-1, 1, 64, dtype=torch.float64)


def judged(error: float, plain_error: float, dtype: torch.dtype = torch.float32, **how: object) -> str | None:
    """What the gates say when one number of RIGHT_OUT is off by `error`, and plain torch's by `plain_error`."""
    off = torch.zeros_like(RIGHT_OUT)
    off[5] = 1.0
    finding = check(RIGHT_OUT + error * off, RIGHT_OUT, RIGHT_OUT + plain_error * off, dtype, **how)
    return None if finding is None else str(finding)


def test_rule_is_twice_the_plain_error_and_one_rounding() -> None:
    rounding = torch.finfo(torch.bfloat16).eps
    assert judged(2 * 0.01 + 0.9 * rounding, 0.01, torch.bfloat16) is None
    said = judged(2 * 0.01 + 1.1 * rounding, 0.01, torch.bfloat16)
    assert said == (
        "out: largest error 0.0286, FlashAttention's rule allows 0.0278 (2 x plain bfloat16 torch + one rounding)"
    )


def test_rule_is_three_times_with_softcap_and_for_gradients() -> None:
    assert judged(0.029, 0.008, torch.bfloat16) is not None
    assert judged(0.029, 0.008, torch.bfloat16, softcap=True) is None
    assert judged(0.029, 0.008, torch.bfloat16, kind="grad") is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relative_l2_does_not_care_for_plain_torch(dtype: torch.dtype) -> None:
    bound = RELATIVE_L2[dtype] * float(RIGHT_OUT.norm())
    assert judged(0.99 * bound, 1.0, dtype) is None
    said = judged(1.01 * bound, 1.0, dtype)
    assert said is not None
    assert said.startswith("out: relative L2 error")
    assert said.endswith(f"{RELATIVE_L2[dtype]:.3g} is allowed in {str(dtype).removeprefix('torch.')}")


def test_relative_l2_of_gradients_allows_thrice_that_of_plain_torch() -> None:
    error = 0.02 * float(RIGHT_OUT.norm())
    assert judged(error, error, torch.bfloat16) is not None
    assert judged(error, error / 2.9, torch.bfloat16, kind="grad") is None
    assert judged(error, error / 3.1, torch.bfloat16, kind="grad") is not None


def test_lse_is_judged_by_its_absolute_error() -> None:
    """A constant on every LSE multiplies every weight: 0.02 is 2 %, however large the LSE is."""
    right = torch.full((64,), 1000.0, dtype=torch.float64)
    finding = check(right + 0.02, right, right + 0.02, torch.bfloat16, kind="lse")
    assert str(finding) == "lse: root mean square error 0.02, 0.008 is allowed in bfloat16"
    assert check(right + 0.005, right, right + 0.005, torch.bfloat16, kind="lse") is None


def test_floor_is_forgiven_element_by_element() -> None:
    error, floor = torch.zeros(64), torch.zeros(64)
    error[5], floor[5] = 0.1, 0.1
    assert check(RIGHT_OUT + error, RIGHT_OUT, RIGHT_OUT, torch.float32, floor=floor) is None
    assert check(RIGHT_OUT + error, RIGHT_OUT, RIGHT_OUT, torch.float32, floor=floor.flip(0)) is not None


def test_nothing_finer_than_the_smallest_number_is_asked() -> None:
    """A sink 30 nats above leaves outputs that float16 cannot hold and bfloat16 can."""
    tiny = torch.full((8,), 1e-13, dtype=torch.float64)
    zeros = torch.zeros(8)
    assert check(zeros.half(), tiny, zeros.half(), torch.float16) is None
    assert check(zeros.bfloat16(), tiny, tiny.bfloat16(), torch.bfloat16) is not None


@pytest.mark.parametrize(
    "actual, message",
    [
        (torch.zeros(3), "out: shape (3,), (64,) is expected"),
        (torch.full((64,), float("nan")), "out: 64 of 64 values are not finite"),
        (torch.full((64,), float("inf")), "out: 64 of 64 values are not finite"),
    ],
)
def test_malformed_results(actual: torch.Tensor, message: str) -> None:
    assert str(check(actual, RIGHT_OUT, RIGHT_OUT, torch.float32)) == message


def test_infinities_must_be_where_the_reference_has_them() -> None:
    right = torch.tensor([1.0, float("-inf"), 2.0]).double()
    assert check(right, right, right, torch.float32, kind="lse") is None
    finding = check(torch.tensor([1.0, 0.0, 2.0]), right, right, torch.float32, kind="lse")
    assert str(finding) == "lse: 1 of 1 rows that see no key do not have lse = -inf"
    finding = check(torch.tensor([1.0, float("-inf"), float("-inf")]), right, right, torch.float32, kind="lse")
    assert str(finding) == "lse: 1 of 3 values are not finite"


def test_nothing_is_right_about_nothing() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    assert check(empty, empty, empty, torch.float32) is None
    zeros = torch.zeros(4, dtype=torch.float64)
    assert check(zeros, zeros, zeros, torch.float32) is None
    assert check(zeros + 1e-9, zeros, zeros, torch.float32) is not None


def test_margin_says_how_much_of_the_allowance_was_used() -> None:
    finding, margin = compare("out", RIGHT_OUT, RIGHT_OUT, RIGHT_OUT, torch.float32)
    assert (finding, margin) == (None, 0.0)
    error = torch.zeros(64, dtype=torch.float64)
    error[5] = 0.5e-5 * float(RIGHT_OUT.norm())
    finding, margin = compare("out", RIGHT_OUT + error, RIGHT_OUT, RIGHT_OUT + 1, torch.float32)
    assert finding is None
    assert margin == pytest.approx(0.5)
