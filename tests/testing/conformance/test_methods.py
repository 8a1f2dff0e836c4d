"""What the kit does with methods: it compares them with their own masks, and asks for their refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.methods.video import rows, sla, sta, svg2, tiles, vmoba, vsa, window
from polyattn.registry.evidence import KEYS
from polyattn.selection.overrides import current_settings
from polyattn.testing import Case, Installed, plan
from polyattn.testing.checks import run_case
from polyattn.testing.families import METHODS
from polyattn.testing.generation import left_out
from polyattn.testing.placed_cases import placed_cases

each = pytest.mark.parametrize("name", METHODS)


def cases_of(name: str, dtype: str = "float32") -> list[Case]:
    target = Installed(name)
    return placed_cases(name, target.rows, target.facts, [dtype])


def findings(name: str, dtype: str = "float32") -> dict[str, list[str]]:
    target = Installed(name)
    found = {case.id: [*map(str, run_case(target, case).findings)] for case in cases_of(name, dtype)}
    return {case: said for case, said in found.items() if said}


@each
def test_a_method_is_what_it_says(name: str) -> None:
    before = current_settings().attention_backend_config
    assert findings(name) == {}
    assert current_settings().attention_backend_config == before


@each
def test_places_of_all_kinds_are_drawn(name: str) -> None:
    known, found = METHODS[name], cases_of(name)
    places = [case.place for case in found if case.place]
    assert len(places) == len(found)
    assert {bool(place.text[0]) for place in places} == {bool(place.text[1]) for place in places} == {False, known.text}
    assert any(len({branch for _, branch in place.points}) == 2 for place in places)
    assert any(place.full for place in places)
    assert max(case.longest[1] for case in found) >= KEYS["hardware"]  # less of it would be no evidence
    assert {case.request.layout for case in found} == {"BSHD", "BHSD"}
    assert {len(case.lengths) for case in found} == {1, 2}
    assert {case.request.heads // case.request.kv_heads for case in found} == {1, 4}
    trained = bool(Installed(name).rows[0].allows.get("grad"))
    assert any(case.request.grad for case in found) is trained
    assert {dtype for dtype in ("float64", "bfloat16") if cases_of(name, dtype)} == {"float64", "bfloat16"}
    assert {option for place in places for option, _ in place.options} >= {o for one in known.choices for o in one}


def rolled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Each query sees what its neighbour should."""
    return lambda *given, **named: function(*given, **named).roll(1, -2)


def uncoarse(self: Any, rows: Tensor, *, gate: Any = None, coarse: Any = None) -> Tensor:
    return SCATTER(self, rows)


def detached(self: Any, *given: Any) -> Tensor | None:
    gate = GATE(self, *given)
    return None if gate is None else gate.detach()


def without_linear(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return torch.zeros(*query.shape[:3], value.shape[3], dtype=query.dtype)


def untouched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The linear branch has no gradient."""
    return lambda *given: function(*given).detach()


def stale(self: Any, plan: Any, query: Tensor, key: Tensor, kept: dict[str, Any]) -> Any:
    """All branches and steps go on from one state."""
    return CLUSTERS(self, plan, query, key, SHARED)


def padded(place: Any, *given: Any) -> Any:
    """Padding of text is taken for text."""
    return CUT(dataclasses.replace(place, valid_text=None), *given)


SCATTER, GATE, CLUSTERS, CUT = rows.Blocks.scatter, vsa.VideoSparse._gate, svg2.SVG2._clusters, tiles.cut
KEPT = vsa.tiles_kept
SHARED: dict[str, Any] = {}

PLANTED: dict[str, tuple[str, Any, str, Any]] = {
    "a window is one tile off": ("window_video_attn", window, "block_map", rolled(window.block_map)),
    "a map of tiles is one tile off": ("sliding_tile_attn", sta, "_listed", rolled(sta._listed)),
    "chosen tiles are one tile off": ("video_sparse_attn", vsa, "best", rolled(vsa.best)),
    "chosen blocks are one block off": ("sla_attn", sla, "best", rolled(sla.best)),
    "so they are with 8 bits": ("sage_sla_attn", sla, "best", rolled(sla.best)),
    "chosen chunks are one query off": ("vmoba_attn", vmoba, "select_chunks", rolled(vmoba.select_chunks)),
    "clusters see those of another": ("sparse_video_gen_2_attn", svg2, "cluster_map", rolled(svg2.cluster_map)),
    "the coarse branch is dropped": ("video_sparse_attn", rows.Blocks, "scatter", uncoarse),
    "the gate is detached": ("video_sparse_attn", vsa.VideoSparse, "_gate", detached),
    "the linear branch is dropped": ("sla_attn", sla, "_linear", without_linear),
    "the linear branch is detached": ("sla_attn", sla, "_linear", untouched(sla._linear)),
    "one tile fewer is kept": ("video_sparse_attn", vsa, "tiles_kept", lambda s, n: max(1, KEPT(s, n) - 1)),
    "padding is seen": ("video_sparse_attn", vsa, "cut", padded),
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_errors_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, where, function, wrong = PLANTED[what]
    # The definition stays as it is where it shares the function.
    right = vsa.vsa_reference
    monkeypatch.setattr(where, function, wrong)
    if function == "tiles_kept":

        def unharmed(*given: Any, **named: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(vsa, "tiles_kept", KEPT)
                return right(*given, **named)

        monkeypatch.setattr(vsa, "vsa_reference", unharmed)
    found = findings(name)
    assert found
    if "detached" in what:
        said = " ".join(line for lines in found.values() for line in lines)
        assert "grad" in said


def test_state_of_another_branch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    SHARED.clear()
    monkeypatch.setattr(svg2.SVG2, "_clusters", stale)
    assert any("0uncond" in case for case in findings("sparse_video_gen_2_attn"))


@each
def test_refusals_are_asked_at_a_place(name: str) -> None:
    """Without one, a rule would leave them to others, and nothing would be learnt of the method."""
    target = Installed(name)
    cases = [case for case in plan(target, dtypes=["float32"]) if case.check == "refusal"]
    assert len(cases) > 50
    dense = [case for case in cases if case.request.family == "dense"]
    assert dense
    assert all(case.request.place for case in dense)
    for case in cases:
        outcome = run_case(target, case)
        assert not outcome.findings, (case.id, outcome.findings)


def test_a_report_says_what_was_not_tried() -> None:
    target = Installed("vmoba_attn")
    (said,) = left_out(target.rows, target.facts, ["dense"], target.name)
    assert said.startswith("moba_threshold_type but query_head: choices among scores of many queries")
    (said,) = left_out(target.rows, target.facts, ["dense"], "of_a_stranger")
    assert said == "calls with a place: the kit does not know the mathematics of of_a_stranger"


def test_what_a_rule_leaves_to_others_counts_as_refused() -> None:
    target = Installed("window_video_attn")
    case = next(case for case in plan(target) if case.fields == ("cross",))
    refused = target.refuse(case)
    assert "leaves it to others" in str(refused)
    assert "cross=True is not declared" in str(refused)


def test_recorded_calls_are_compared_too() -> None:
    """Where a device records graphs, a case asks for it."""
    target = Installed("video_sparse_attn")
    graphs = dataclasses.replace(
        target.rows[0], allows={**target.rows[0].allows, **polyattn.contract.row(graph_capture=True).allows}
    )
    (case,) = [c for c in placed_cases("video_sparse_attn", [graphs], target.facts, ["float32"]) if c.check != "values"]
    assert case.check == "capture"
    assert case.request.graph_capture is True
