"""Shrinking: what comes out still fails, and nothing smaller of its kind does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from polyattn.contract import AttentionRequest
from polyattn.testing import Case
from polyattn.testing.fuzz import Drawn, draw, shrink, shrinking
from polyattn.testing.fuzz.drawing import settled

LARGE = Drawn(
    settled(
        Case(
            request=AttentionRequest(
                dtype="bfloat16",
                head_dim=40,
                v_head_dim=24,
                heads=8,
                kv_heads=2,
                layout="BHSD",
                causal="bottom_right",
                window=(16, 3),
                softcap=5.0,
                sinks=True,
                mask="additive",
                lse=True,
                grad=("query", "key", "value", "mask", "sinks"),
                deterministic=True,
            ),
            lengths=((100, 130),) * 3,
            storage="padded",
            sink="dominant",
            mask_shape="heads",
            mask_dtype="float32",
            closed_rows=True,
        )
    )
)


def test_everything_goes_where_everything_fails() -> None:
    small = shrink(LARGE, lambda drawn: True)
    assert small.case == settled(
        Case(
            request=AttentionRequest(dtype="float32", head_dim=1, v_head_dim=1, heads=1, kv_heads=1),
            lengths=((0, 0),),
        )
    )


@pytest.mark.parametrize(
    "fails, id",
    [
        (lambda case: case.request.softcap and case.longest[0] > 1, "dense-float32-B1_S2x0-H1x1-D1x1-softcap=5"),
        (lambda case: case.longest[1] > 64, "dense-float32-B1_S0x65-H1x1-D1x1"),
        (lambda case: case.request.window[0] >= 2, "dense-float32-B1_S0x0-H1x1-D1x1-window=2_-1-zero_size"),
        (lambda case: case.request.group > 1, "dense-float32-B1_S0x0-H2x1-D1x1"),
        (lambda case: "key" in case.request.grad, "dense-float32-B1_S0x0-H1x1-D1x1-grad=key"),
        (lambda case: len(case.lengths) > 1 and case.request.sinks, "dense-float32-B2_S0x0-H1x1-D1x1-sinks"),
        (lambda case: case.request.dtype == "bfloat16", "dense-bfloat16-B1_S0x0-H1x1-D1x1"),
        (lambda case: case.storage == "padded", "padded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_matters_stays(fails: object, id: str) -> None:  # noqa: A002
    assert callable(fails)
    small = shrink(LARGE, lambda drawn: bool(fails(drawn.case)))
    assert fails(small.case)
    assert id.removesuffix("-zero_size") in small.id.replace("-s_relation=fewer", "").replace("-s_relation=more", "")


@pytest.mark.parametrize("family", ["varlen", "paged", "mla"])
def test_other_families_shrink_too(family: str) -> None:
    drawn = next(d for n in range(99) if (d := draw(2, n)).case.request.family == family and len(d.case.lengths) > 2)
    small = shrink(drawn, lambda candidate: sum(q for q, _ in candidate.case.lengths) > 1)
    assert sum(q for q, _ in small.case.lengths) == 2
    assert (small.case.request.heads, small.case.request.head_dim) == (1, 1)
    assert [name for name, _ in small.case.request.active() if name in ("window", "softcap", "mask", "causal")] == []


def test_a_wrong_call_stays_wrong() -> None:
    small = shrink(Drawn(LARGE.case, "scale nan"), lambda drawn: drawn.case.longest[0] > 3)
    assert small.wrong == "scale nan"
    assert small.case.longest == (4, 0)


def test_what_does_not_fail_again_is_left_as_it_is() -> None:
    assert shrink(LARGE, lambda drawn: False) is LARGE


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a tried call moves: no call is begun once the time is up."""
    tried: list[Drawn] = []
    monkeypatch.setattr(shrinking, "time", SimpleNamespace(monotonic=lambda: 0.5 * len(tried)))
    shrink(LARGE, lambda drawn: not tried.append(drawn), seconds=2.2)  # type: ignore[func-returns-value]
    assert len(tried) == 5
