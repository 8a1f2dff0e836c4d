"""What is drawn: the same for a seed, valid, and everything that matters often enough."""

from __future__ import annotations

import dataclasses

import pytest

from polyattn.contract import AttentionRequest
from polyattn.testing import Case
from polyattn.testing.fuzz import Drawn, draw
from polyattn.testing.fuzz.drawing import settled
from polyattn.testing.fuzz.wrong import WRONGS

CALLS = [draw(0, number) for number in range(600)]
CASES = [drawn.case for drawn in CALLS if not drawn.wrong]


def test_a_seed_repeats_its_calls() -> None:
    assert [draw(0, number) for number in range(50)] == CALLS[:50]
    assert draw(0, 40) == CALLS[40]  # whatever was drawn before
    assert [draw(1, number) for number in range(50)] != CALLS[:50]


def share(holds: object) -> float:
    assert callable(holds)
    return sum(bool(holds(case)) for case in CASES) / len(CASES)


@pytest.mark.parametrize(
    "what, least",
    [
        ("window", 0.3),
        ("softcap", 0.2),
        ("sinks", 0.2),
        ("mask", 0.4),
        ("lse", 0.4),
        ("grad", 0.15),
        ("scale", 0.3),
        ("causal", 0.5),
        ("deterministic", 0.04),
        ("group", 0.4),
        ("kv_scales", 0.01),
        ("save_kv_cache", 0.02),
        ("kv_layout", 0.04),
        ("misaligned", 0.1),
        ("zero_size", 0.02),
        ("dropout", 0.005),
        ("v_head_dim", 0.15),
    ],
)
def test_options_are_frequent(what: str, least: float) -> None:
    assert share(lambda case: what in dict(case.request.active())) >= least


@pytest.mark.parametrize("field", ["family", "dtype", "causal", "mask", "s_relation", "layout", "kv_dtype", "phase"])
def test_every_word_is_drawn(field: str) -> None:
    wanted = {
        "family": {"dense", "varlen", "paged", "mla"},
        "dtype": {"float64", "float32", "bfloat16", "float16"},
        "causal": {"none", "bottom_right", "top_left"},
        "mask": {"none", "bool", "additive"},
        "s_relation": {"equal", "one", "fewer", "more"},
        "layout": {"BSHD", "BHSD", "THD"},
        "kv_dtype": {"auto", "fp8_e4m3", "fp8_e5m2", "float32"},
        "phase": {"prefill", "decode", "extend"},
    }
    assert {getattr(case.request, field) for case in CASES} == wanted[field]


def test_lengths_beyond_a_block_and_of_nothing_are_frequent() -> None:
    assert share(lambda case: case.longest[1] > 64) > 0.3
    assert share(lambda case: any(not k for _, k in case.lengths)) > 0.08
    assert share(lambda case: any(q != k for q, k in case.lengths)) > 0.5


def test_the_kits_own_axes_are_drawn() -> None:
    storages = {"contiguous", "gapped", "padded", "transposed", "misaligned", "expanded"}
    assert {case.storage for case in CASES} == storages
    assert {case.out for case in CASES} == {"", "contiguous", "strided"}
    assert {case.sink for case in CASES} == {"usual", "dominant", "off"}
    assert {case.mask_shape for case in CASES} == {"full", "batch", "heads", "one", "expanded"}
    assert any(case.closed_rows for case in CASES)
    assert any(case.new_rows and not case.request.save_kv_cache for case in CASES)


def test_wrong_calls_are_drawn_of_every_family() -> None:
    wrong = [drawn for drawn in CALLS if drawn.wrong]
    assert 0.15 < len(wrong) / len(CALLS) < 0.35
    assert {drawn.case.request.family for drawn in wrong} == set(WRONGS)


def test_settling_twice_changes_nothing() -> None:
    assert [settled(case) for case in CASES] == CASES


def test_settling_makes_values_one_call() -> None:
    """What follows from other values does follow."""
    request = AttentionRequest(
        family="paged",
        dtype="float32",
        head_dim=8,
        page_size=4,
        grad=("query", "sinks"),
        layout="BHSD",
        lse=True,
        save_kv_cache=False,
    )
    lengths = ((1, 5), (1, 0), (3, 2))
    case = settled(Case(request=request, lengths=lengths, sink="off", storage="expanded"))
    assert case.request.grad == ()
    assert (case.request.layout, case.request.phase, case.request.s_relation) == ("THD", "extend", "fewer")
    assert case.lengths == ((1, 5), (1, 0), (3, 0))  # a sequence shorter than its queries is a padding row
    assert (case.sink, case.storage, case.new_rows) == ("usual", "contiguous", True)
    latent = dataclasses.replace(request, family="mla", v_head_dim=16, heads=4, kv_heads=2, save_kv_cache=None)
    case = settled(Case(request=latent, lengths=((1, 5),)))
    assert (case.request.kv_heads, case.request.v_head_dim, case.request.scale) == (1, 8, 8**-0.5)
    assert (case.request.phase, case.request.s_relation, case.new_rows) == ("decode", "one", False)


def test_the_name_of_a_call_says_how_it_is_spoilt() -> None:
    case = CASES[0]
    assert Drawn(case).id == case.id
    assert Drawn(case, "scale nan").id == f"{case.id} scale nan"
