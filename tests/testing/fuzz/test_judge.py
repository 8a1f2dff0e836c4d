"""Verdicts: agreement, refusals, and the kinds of failure."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.contract import AttentionRequest
from polyattn.errors import UnsupportedRequestError
from polyattn.semantics import reference
from polyattn.testing import Case
from polyattn.testing.fuzz import Calls, Drawn, judge
from polyattn.testing.fuzz.drawing import settled

from .conftest import CPU, Forward, Registered


def dense(*, s: int = 5, **options: Any) -> Drawn:
    request = AttentionRequest(dtype="float32", head_dim=8, v_head_dim=8, heads=2, kv_heads=2, **options)
    return Drawn(settled(Case(request=request, lengths=((s, s),) * 2)))


def honest(request: AttentionRequest) -> Forward:
    def forward(query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None, **_: Any) -> Any:
        made = reference.attention(query, key, value, layout=request.layout)
        return made if out is None else out.copy_(made)  # type: ignore[arg-type]

    return forward


def bent(change: Any) -> Any:
    """A backend whose result is passed through `change`."""
    return lambda request: lambda *tensors, **given: change(honest(request)(*tensors, **given))


def raising(error: Exception) -> Any:
    def forward(*tensors: Tensor, **given: Any) -> Any:
        raise error

    return lambda request: forward


def test_agreed(registered: Registered) -> None:
    with registered(honest) as name:
        assert judge(dense(), name, CPU).word == "agreed"
    assert judge(dense(), None, CPU).word == "agreed"


def test_refused_with_a_reason(registered: Registered) -> None:
    with registered(honest) as name:
        assert judge(dense(softcap=2.0, alibi=False, dropout=0.25), name, CPU).word == "refused"


def test_disagreement_says_by_how_much(registered: Registered) -> None:
    with registered(bent(lambda out: out * 1.01)) as name:
        failure = judge(dense(), name, CPU).failure
    assert failure is not None
    assert failure.check == "out"
    assert "rule allows" in failure.message
    assert 100 < failure.excess < float("inf")
    assert str(failure) == f"out: {failure.message}"


def test_an_exception_that_is_none_of_ours(registered: Registered) -> None:
    with registered(raising(IndexError("list index out of range"))) as name:
        failure = judge(dense(), name, CPU).failure
    assert failure is not None
    assert failure.check == "call"
    assert failure.message.startswith("raised IndexError: list index")


@pytest.mark.parametrize(
    "refusal", [UnsupportedRequestError(""), UnsupportedRequestError("no", {"acme": []})], ids=["no words", "no reason"]
)
def test_a_refusal_without_a_reason(registered: Registered, refusal: Exception) -> None:
    with registered(raising(refusal)) as name:
        failure = judge(dense(), name, CPU).failure
    assert failure is not None
    assert (failure.check, failure.message) == ("refusal", "refused without a reason")


def test_a_wrong_call_that_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Drawn(dense().case, "scale nan")
    assert judge(wrong, "reference", CPU).word == "rejected"
    # As if nobody looked at it.
    monkeypatch.setattr("polyattn.dispatch.call_key.validation.check_statics", lambda **given: given["window"])
    failure = judge(wrong, "reference", CPU).failure
    assert failure is not None
    assert (failure.check, failure.message) == ("served", "a call that is wrong (scale nan) was answered")


def test_a_wrong_call_that_raises_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise TypeError("float expected")

    monkeypatch.setattr("polyattn.dispatch.call_key.validation.check_statics", fails)
    failure = judge(Drawn(dense().case, "scale '8'"), "reference", CPU).failure
    assert failure is not None
    assert failure.message.startswith("raised TypeError: float expected; a PolyattnError")


def test_errors_just_above_their_allowance_are_asked_again_with_more_rows(registered: Registered) -> None:
    """The largest of a handful of errors may be anything: here the small call is a little off, and no other."""
    calls: list[int] = []

    def sometimes(out: Tensor) -> Tensor:
        calls.append(out.shape[0])
        return out + 3e-6 if out.shape[0] == 2 else out

    with registered(bent(sometimes)) as name:
        assert judge(dense(), name, CPU).word == "agreed"
    assert calls == [2, 16]
    with registered(bent(lambda out: out + 3e-6)) as name:
        assert judge(dense(), name, CPU).word == "failed"


def test_documented_warnings_are_none(registered: Registered) -> None:
    """Automatic selection that ends at the reference says so; the run goes on, whatever the filters are."""

    def warns(out: Tensor) -> Tensor:
        warnings.warn("polyattn: the slow reference serves this", RuntimeWarning, stacklevel=1)
        return out

    with registered(bent(warns)) as name:
        assert judge(dense(), name, CPU).word == "agreed"


def test_other_warnings_are_as_the_filters_say(registered: Registered) -> None:
    def warns(out: Tensor) -> Tensor:
        warnings.warn("acme: deprecated", UserWarning, stacklevel=1)
        return out

    with registered(bent(warns)) as name:
        failure = judge(dense(), name, CPU).failure
    assert failure is not None  # filterwarnings = error
    assert "acme: deprecated" in failure.message


def test_dropout_is_judged_alike_every_time() -> None:
    drawn = dense(dropout=0.25)
    state = torch.get_rng_state()
    assert {judge(drawn, "reference", CPU).word for _ in range(3)} == {"agreed"}
    assert torch.equal(torch.get_rng_state(), state)


def test_calls_keep_what_was_raised(registered: Registered) -> None:
    from polyattn.testing import run_case

    error = ValueError("no")
    with registered(raising(error)) as name:
        target = Calls(name, "cpu")
        assert run_case(target, dense().case).verdict == "failed"
    assert target.raised is error
    assert (target.name, Calls(None, "cpu").name) == ("acme", "automatic")
