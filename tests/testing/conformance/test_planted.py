"""The kit on backends with one known bug each: it notices every one of them, and nothing where there is none."""

from __future__ import annotations

import pytest

from polyattn.registry.manager import get_manager
from polyattn.testing import Case, Outcome, catching
from polyattn.testing.catching import NOTHING, Catch, blanks, catch, catches
from polyattn.testing.planted import BUGS, NO_BUG


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("blank", blanks(), ids=lambda blank: f"{blank.bug}-{blank.family}")
def test_every_planted_bug_is_caught_in_every_family(blank: Catch) -> None:
    before = get_manager()
    found = catch(blank)
    assert found.good, found
    assert found.case.startswith(blank.family) or blank.bug == NO_BUG
    assert get_manager() is before


def test_every_bug_is_tried_wherever_it_shows() -> None:
    pairs = {(blank.bug, blank.family) for blank in blanks()}
    assert {pair for pair in pairs if pair[0] != NO_BUG} == {(b.name, f) for b in BUGS.values() for f in b.families}
    assert {family for bug, family in pairs if bug == NO_BUG} == {"dense", "varlen", "paged", "mla"}


def test_a_kit_that_sees_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(bug for bug in BUGS.values() if bug.families == ("dense",))
    monkeypatch.setattr(catching, "BUGS", {one.name: one})

    def blind(target: object, case: Case) -> Outcome:
        return Outcome(case, "passed")

    monkeypatch.setattr(catching, "run_case", blind)
    told: list[tuple[int, int, str]] = []
    found = list(catches(lambda *words: told.append(words)))
    assert [(c.bug, c.caught_by, c.good) for c in found] == [(NO_BUG, NOTHING, True), (one.name, NOTHING, False)]
    assert told == [(0, 2, f"{NO_BUG}, dense"), (1, 2, f"{one.name}, dense")]


def test_a_finding_where_there_is_no_bug_is_no_good() -> None:
    false_alarm = Catch(NO_BUG, "nothing is wrong", "dense", "out", "some case")
    assert not false_alarm.good
    assert false_alarm.to_dict()["good"] is False
