"""Right calls whose numbers and flags have other types: what is drawn of them, and what is found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from polyattn.contract import AttentionRequest
from polyattn.errors import InvalidInputError
from polyattn.testing import Case
from polyattn.testing.fuzz import Drawn, draw, exit_code, judge, script, shrink
from polyattn.testing.fuzz import judging as judging_module
from polyattn.testing.fuzz.drawing import settled
from polyattn.testing.fuzz.saying import SAYINGS, said_as

from .conftest import CPU

SAID = [drawn for drawn in (draw(0, number) for number in range(400)) if drawn.saying]


def of(family: str, saying: str) -> Drawn:
    more: dict[str, Any] = {"page_size": 4, "causal": "bottom_right"} if family in ("paged", "mla") else {}
    more |= {"kv_layout": "NHD", "save_kv_cache": True} if family == "paged" else {}
    request = AttentionRequest(
        family=family, dtype="float32", head_dim=8, v_head_dim=8, heads=2, kv_heads=2, window=(3, 2), scale=2.0,
        softcap=0.0 if family == "mla" else 2.0, lse=True, deterministic=True, **more,
    )  # type: ignore[arg-type]  # fmt: skip
    return Drawn(settled(Case(request=request, lengths=((5, 5),) * 2)), saying=saying)


def test_values_stay_and_types_do_not() -> None:
    given = {"scale": 0.1, "softcap": 2.0, "n": 3, "flag": True, "window": (3, -1), "word": "none", "nothing": None}
    for saying in SAYINGS:
        assert said_as(saying, given) == given
    numpys = [type(value) for value in said_as("numpy", given).values()]
    assert numpys == [np.float64, np.float32, np.int64, np.bool_, tuple, str, type(None)]
    assert [type(value) for value in said_as("ints", given).values()] == [float, int, int, int, tuple, str, type(None)]
    kinds = [{type(bound) for bound in said_as(saying, given)["window"]} for saying in SAYINGS]
    assert kinds == [{np.int16}, {float}]


def test_both_are_drawn_of_every_family_and_of_right_calls_alone() -> None:
    assert {(drawn.case.request.family, drawn.saying) for drawn in SAID} == {
        (family, saying) for family in ("dense", "varlen", "paged", "mla") for saying in SAYINGS
    }
    assert not any(drawn.wrong or drawn.way or drawn.case.request.dropout for drawn in SAID)
    assert all(drawn.id.endswith(drawn.saying) for drawn in SAID)


@pytest.mark.parametrize("saying", SAYINGS)
@pytest.mark.parametrize("family", ["dense", "varlen", "paged", "mla"])
def test_every_call_takes_them(family: str, saying: str) -> None:
    drawn = of(family, saying)
    assert judge(drawn, "reference", CPU).word == "agreed"
    assert judge(drawn, None, CPU).word == "agreed"


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The public call with its arguments passed through `change` first."""
    real = judging_module.arguments

    def arguments(case: Case, device: torch.device) -> tuple[Callable[..., Any], dict[str, Any]]:
        call, given = real(case, device)

        @functools.wraps(call)
        def wrong(**named: Any) -> Any:
            return call(**change(named))

        return wrong, given

    monkeypatch.setattr(judging_module, "arguments", arguments)


@pytest.mark.parametrize("saying", SAYINGS)
def test_another_answer_is_found(monkeypatch: pytest.MonkeyPatch, saying: str) -> None:
    changed(monkeypatch, lambda given: given if type(given["scale"]) is float else {**given, "scale": None})
    failure = judge(of("dense", saying), None, CPU).failure
    assert failure is not None
    assert (failure.check, failure.message) == (
        f"said with {saying}",
        "another answer than with Python's numbers and flags",
    )


def test_a_refusal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        if type(given["deterministic"]) is not bool:
            raise InvalidInputError("no flag")
        return given

    changed(monkeypatch, change)
    failure = judge(of("varlen", "numpy"), None, CPU).failure
    assert failure is not None
    assert failure.check == "call"
    assert failure.message == "raised InvalidInputError: no flag; with Python's numbers and flags it is answered"


def test_without_numpy_the_plain_call_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(judging_module, "said_as", lambda *_: pytest.fail("NumPy is asked for"))
    assert judge(of("dense", "numpy"), "reference", CPU).word == "agreed"


def test_a_script_says_it_and_passes_where_nothing_is_wrong() -> None:
    drawn = of("dense", "ints")
    text = script(drawn, judging_module.Failure("said with ints", "another answer"), None, CPU, "polyattn fuzz")
    assert "Drawn(case, saying='ints')" in text
    assert exit_code(text) == 0


def test_types_that_do_not_matter_are_left_out_of_what_is_found() -> None:
    drawn = of("dense", "numpy")
    assert shrink(drawn, lambda smaller: True).saying == ""
    assert shrink(drawn, lambda smaller: smaller.saying == "numpy").saying == "numpy"
