"""The kit on linear attention with one mistake each, such as kernels make: it notices every one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.contract import AttentionRequest
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


PLANTED = {
    "late_decay": ("the state decays after the update", late_decay),
    "dropped_chunk": ("the last chunk is dropped where it is not full", dropped_chunk),
    "turned_state": ("the state is read transposed", turned_state),
    "small_beta": ("betas are 3 % too small", unscaled_beta),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_of_a_recurrence_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what, change = PLANTED[name]
    monkeypatch.setitem(BUGS, name, Bug(name, what, ("linear",), _given(change)))  # type: ignore[arg-type]
    found = catch(Catch(name, what, "linear"))
    assert found.caught_by != NOTHING, found
    assert found.case.startswith("linear")


def test_no_mistake_is_found_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUGS, "right", Bug("right", "nothing is wrong", ("linear",), _honest))  # type: ignore[arg-type]
    assert catch(Catch("right", "nothing is wrong", "linear")).caught_by == NOTHING
