"""The kit on linear attention with one mistake each, such as kernels make: it notices every one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Range, row
from polyattn.contract.request import changed
from polyattn.lowering.gather_states import GatherStates
from polyattn.testing import Case, generate, run_case
from polyattn.testing.catching import NOTHING, Catch, catch
from polyattn.testing.planted import BUGS, Bug, _given, _honest

Change = Mapping[str, Any]


def late_decay(request: AttentionRequest, tensors: tuple[Tensor, ...], given: Change) -> Change:
    gate = given["gate"]
    return {"gate": torch.cat([torch.zeros_like(gate[:, :1]), gate[:, :-1]], 1)}


def dropped_chunk(request: AttentionRequest, tensors: tuple[Tensor, ...], given: Change) -> Change:
    whole = torch.arange(given["beta"].shape[1], device=given["beta"].device) < given["beta"].shape[1] // 16 * 16
    gate = given["gate"]
    kept = whole[:, None, None] if gate.ndim == 4 else whole[:, None]
    return {"beta": given["beta"] * whole[:, None], "gate": gate * kept}


def turned_state(request: AttentionRequest, tensors: tuple[Tensor, ...], given: Change) -> Change:
    state = given["state"]
    return {"state": state.mT if state is not None and state.shape[-1] == state.shape[-2] else state}


def unscaled_beta(request: AttentionRequest, tensors: tuple[Tensor, ...], given: Change) -> Change:
    return {"beta": given["beta"] * 0.97}


def as_a_chain(request: AttentionRequest, tensors: tuple[Tensor, ...], given: Change) -> Change:
    return {"parents": None}


def late_border(request: AttentionRequest, tensors: tuple[Tensor, ...], given: Change) -> Change:
    starts = given.get("cu_seqlens")
    return {} if starts is None else {"cu_seqlens": torch.cat([starts[:1], starts[1:3] + 1, starts[3:]])}


PLANTED = {
    "late_decay": ("the state decays after the update", late_decay),
    "dropped_chunk": ("the last chunk is dropped where it is not full", dropped_chunk),
    "turned_state": ("the state is read transposed", turned_state),
    "small_beta": ("betas are 3 % too small", unscaled_beta),
    "late_border": ("packed sequences begin one token late", late_border),
    "chain": ("draft tokens follow each other, whatever their parents are", as_a_chain),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_of_a_recurrence_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what, change = PLANTED[name]
    monkeypatch.setitem(BUGS, name, Bug(name, what, ("linear",), _given(change)))
    found = catch(Catch(name, what, "linear"))
    assert found.caught_by != NOTHING, found
    assert found.case.startswith("linear")


def test_states_of_drafts_that_are_one_token_late_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(request: AttentionRequest) -> Any:
        honest = _honest(request)

        def forward(*tensors: Tensor, **given: Any) -> Any:
            out, states = honest(*tensors, **given)
            return out, states.roll(1, 1) if request.state_out == "every" else states

        return forward

    monkeypatch.setitem(BUGS, "late", Bug("late", "states are one token late", ("linear",), plant))
    found = catch(Catch("late", "states are one token late", "linear"))
    assert found.caught_by == "state", found
    assert "state_out=every" in found.case


def test_no_mistake_is_found_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUGS, "right", Bug("right", "nothing is wrong", ("linear",), _honest))
    assert catch(Catch("right", "nothing is wrong", "linear")).caught_by == NOTHING


class Pooled:
    """A backend whose states are in slots of a pool, with one mistake."""

    name, device = "pooled", torch.device("cpu")
    rows = (
        row(
            family="linear",
            dtype="float32",
            head_dim=Range(16, 64),
            method="gdn",
            phase=("prefill", "decode", "verify"),
            s_relation=("equal", "one"),
            state_layout="KV",
            state_slots=(True,),
            state_out=("", "every"),
            batch_invariant=True,
        ),
    )

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        one, given, pool = changed(case.request, state_slots=False), {**tensors, **extra}, extra["state"]
        gathered = GatherStates()
        (rewrite,) = gathered.rewrites(case.request)
        forward = gathered.bind(case.request, rewrite, (BUGS["right"].bind(one),), ()).forward
        if self.mistake == "of another sequence":
            given["state_slots"] = extra["state_slots"].where(extra["state_slots"] < 0, extra["state_slots"].flip(0))
        if self.mistake == "in a copy":
            given["state"] = pool.clone()
        tensors_given = [given.pop(name) for name in ("query", "key", "value")]
        found, states = forward(*tensors_given, out=out, **given)
        if self.mistake == "without a slot":
            pool[-1] += 1.0
        if self.mistake == "while drafts are verified" and case.request.state_out == "every":
            pool[0] = states[0, -1]
        return found, states


MISTAKES = ("of another sequence", "in a copy", "without a slot", "while drafts are verified")


@pytest.mark.parametrize("mistake", ["", *MISTAKES])
def test_a_mistake_with_slots_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUGS, "right", Bug("right", "nothing is wrong", ("linear",), _honest))
    target = Pooled(mistake)
    cases = generate(target.rows, {"platform": "cpu"}, families=["linear"], dtypes=["float32"], per_row=12)
    assert {case.request.state_out for case in cases} == {"", "every"}
    outcomes = [run_case(target, case) for case in cases]
    failed = [outcome for outcome in outcomes if outcome.findings]
    assert bool(failed) == bool(mistake), [str(outcome) for outcome in failed[:2]]
    assert not any(finding.check == "call" for outcome in failed for finding in outcome.findings), str(failed[0])
