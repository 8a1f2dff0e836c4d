"""What the kit does with methods: it asks for their refusals, and says that what they serve is tried elsewhere."""

from __future__ import annotations

import pytest

from polyattn.testing import Installed, plan
from polyattn.testing.checks import run_case
from polyattn.testing.generation import left_out


@pytest.mark.parametrize(
    "name", ["window_video_attn", "video_sparse_attn", "sla_attn", "vmoba_attn", "sparse_video_gen_2_attn"]
)
def test_refusals_are_asked_at_a_place(name: str) -> None:
    """Without one, a rule would leave them to others, and nothing would be learnt of the method."""
    target = Installed(name)
    cases = plan(target)
    assert {case.check for case in cases} == {"refusal"}
    assert len(cases) > 50
    dense = [case for case in cases if case.request.family == "dense"]
    assert dense
    assert all(case.request.place for case in dense)
    for case in cases:
        outcome = run_case(target, case)
        assert not outcome.findings, (case.id, outcome.findings)


def test_a_report_says_what_was_not_tried() -> None:
    target = Installed("window_video_attn")
    (said,) = left_out(target.rows, target.facts, ["dense"])
    assert said.startswith("calls with a place: a method is compared with its own mask")


def test_what_a_rule_leaves_to_others_counts_as_refused() -> None:
    target = Installed("window_video_attn")
    case = next(case for case in plan(target) if case.fields == ("cross",))
    refused = target.refuse(case)
    assert "leaves it to others" in str(refused)
    assert "cross=True is not declared" in str(refused)
