"""Wrong calls: each way to spoil one is refused with a typed error; nothing here is vacuous."""

from __future__ import annotations

import itertools

import pytest
import torch

from polyattn.testing.fuzz import Drawn, Verdict, draw, judge
from polyattn.testing.fuzz.judging import arguments
from polyattn.testing.fuzz.wrong import CONTENTS, WRONGS, spoil

from .conftest import CPU

EVERY = [(family, wrong) for family, ways in WRONGS.items() for wrong in ways]
CASES = [draw(5, number).case for number in range(200)]


def rejected(family: str, wrong: str, backend: str | None, calls: int) -> list[Verdict]:
    """The verdicts on the first calls that can be spoilt in this way."""
    verdicts = (judge(Drawn(case, wrong), backend, CPU) for case in CASES if case.request.family == family)
    return list(itertools.islice((v for v in verdicts if v.word != "passed over"), calls))


@pytest.mark.slow(keep=48)
@pytest.mark.parametrize("family, wrong", EVERY, ids=[f"{family}: {wrong}" for family, wrong in EVERY])
def test_wrong_calls_are_rejected(family: str, wrong: str, pytestconfig: pytest.Config) -> None:
    calls = 3 if pytestconfig.getoption("--polyattn-full") else 1
    for backend in (None, "reference"):
        verdicts = rejected(family, wrong, backend, calls)
        assert verdicts, "no call could be spoilt in this way"
        for verdict in verdicts:
            assert verdict.word == "rejected", verdict.failure


def test_contents_are_named_as_the_ways_are() -> None:
    every = {wrong for ways in WRONGS.values() for wrong in ways}
    assert not CONTENTS - every


def test_contents_are_passed_over_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator without POLYATTN_VALIDATE=1."""
    monkeypatch.setattr("polyattn.testing.fuzz.judging.contents_readable", lambda tensor: False)
    case = next(case for case in CASES if case.request.family == "varlen" and case.longest[0])
    assert judge(Drawn(case, "cu_seqlens_q ends past T"), "reference", CPU).word == "passed over"
    assert judge(Drawn(case, "cu_seqlens_q int64"), "reference", CPU).word == "rejected"


def test_only_what_is_wrong_changes() -> None:
    case = next(case for case in CASES if case.request.family == "dense")
    _, given = arguments(case, CPU)
    spoilt = spoil("dense", "scale nan", given)
    assert spoilt is not None
    assert [name for name in spoilt if spoilt[name] is not given.get(name)] == ["scale"]
    assert spoil("dense", "query None", given) == {**given, "query": None}


def test_a_call_that_cannot_be_spoilt_in_a_way_is_passed_over() -> None:
    query = torch.ones(1, 3, 2, 1)  # a last axis of one number is dense whatever its stride is
    assert spoil("dense", "query not dense", {"query": query, "layout": "BSHD"}) is None
