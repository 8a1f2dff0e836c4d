"""Planted bugs: each is there, only where it says it is, and the fuzzer finds it in a fraction of CI's bound."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import polyattn
from polyattn.epoch import EPOCH
from polyattn.errors import BackendUnavailableError, InvalidInputError
from polyattn.registry.manager import get_manager
from polyattn.testing.fuzz import draw, fuzz, judge
from polyattn.testing.planted import BUGS, NO_BUG, planted

from .conftest import CPU

PAGE = (Path(__file__).parents[3] / "docs" / "fuzzing.md").read_text(encoding="utf-8")
SEEDS = (0, 1, 2)
CALLS = 400
"""Calls in which each bug is found, however slow the machine is: in 40 seeds the rarest took 170 at most."""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", SEEDS)
def test_all_bugs_are_found_within_the_calls_of_a_run_in_ci(seed: int) -> None:
    for name, bug in BUGS.items():
        with planted(name) as backend:
            report = fuzz([backend], seed=seed, calls=CALLS, first=True)
        assert [found.backend for found in report.failures] == [backend], f"{name} was not found"
        drawn = report.failures[0].drawn
        assert not drawn.wrong
        assert drawn.case.request.family in bug.families


def test_no_bug_is_found_where_there_is_none() -> None:
    with planted(NO_BUG) as backend:
        verdicts = [judge(draw(seed, number), backend, CPU) for seed in SEEDS for number in range(60)]
    assert not [verdict.failure for verdict in verdicts if verdict.failure]
    assert {verdict.word for verdict in verdicts} <= {"agreed", "rejected", "passed over", "refused"}
    assert sum(verdict.word == "agreed" for verdict in verdicts) > 120


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_in_its_families_only(name: str) -> None:
    others = {"dense", "varlen", "paged", "mla"} - set(BUGS[name].families)
    calls = [draw(3, number) for number in range(120)]
    calls = [drawn for drawn in calls if drawn.case.request.family in others and not drawn.wrong]
    with planted(name) as backend:
        assert all(judge(drawn, backend, CPU).word == "agreed" for drawn in calls)


def test_the_process_is_left_as_it_was() -> None:
    before, backends, epoch = get_manager(), dict(get_manager().backends), EPOCH.value
    with planted("zeros") as backend:
        assert backend == "planted_zeros"
        assert get_manager() is not before
        q = torch.ones(1, 2, 1, 4)
        assert not polyattn.attention(q, q, q, backend=backend).any()
        assert polyattn.explain(polyattn.attention, q, q, q).backend != backend  # by name only
    assert get_manager() is before
    assert get_manager().backends == backends
    assert EPOCH.value > epoch
    with pytest.raises(BackendUnavailableError):
        polyattn.attention(q, q, q, backend=backend)


def test_an_error_within_leaves_it_as_it_was_too() -> None:
    before = get_manager()
    with pytest.raises(ZeroDivisionError), planted("zeros"):
        1 / 0  # noqa: B018
    assert get_manager() is before


def test_an_unknown_bug() -> None:
    with pytest.raises(
        InvalidInputError, match=r"no planted bug is named 'zero'\. Did you mean 'zeros'.*Known: zeros, "
    ):
        planted("zero").__enter__()


def test_the_page_lists_every_bug() -> None:
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.M)) == {bug.name: bug.what for bug in BUGS.values()}


@pytest.mark.slow(keep=16)
@pytest.mark.parametrize("name", BUGS)
def test_out_is_written_by_backends_with_a_bug_too(name: str) -> None:
    q = torch.randn(1, 3, 2, 4)
    out = torch.empty_like(q)
    with planted(name) as backend:
        assert polyattn.attention(q, q, q, out=out, backend=backend) is out
        assert torch.equal(out, polyattn.attention(q, q, q, backend=backend))
