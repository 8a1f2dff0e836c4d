"""`polyattn parallel-plan`: what it predicts agrees with what was measured, and which mesh it takes."""

from __future__ import annotations

import pytest

from polyattn.distributed.costs import Machine, Shape, cost, costs

from .conftest import Run

MEASURED = {32_760: (11.18, 10.90), 75_600: (55.15, 55.36)}
"""On two H100, of H24 D128 in bfloat16: ms of Ulysses and of a ring (benchmarks/results/parallel.json)."""


@pytest.mark.parametrize("tokens", MEASURED)
def test_two_devices_take_as_long_as_was_measured(tokens: int) -> None:
    ulysses, ring = MEASURED[tokens]
    shape = Shape(tokens, 24, 24, 128)
    assert cost(shape, 1, 2).time * 1e3 == pytest.approx(ulysses, rel=0.05)
    assert cost(shape, 2, 1).time * 1e3 == pytest.approx(ring, rel=0.05)


def test_what_is_sent_is_what_a_rank_does_not_keep() -> None:
    number = 4 * 10 * 2 * 16  # bytes of half of the tokens, of two heads
    shape = Shape(20, 4, 4, 16, bytes=4)
    assert cost(shape, 1, 2).exchanged == 4 * number
    assert cost(shape, 2, 1).passed == 2 * 2 * number  # keys and values of all heads
    assert cost(shape, 2, 1).exchanged == cost(shape, 1, 2).passed == 0
    trained = Shape(20, 4, 4, 16, bytes=4, train=True)
    assert cost(trained, 1, 2).exchanged == 2 * cost(shape, 1, 2).exchanged
    assert cost(trained, 2, 1).passed == 3 * cost(shape, 2, 1).passed


def test_one_device_sends_nothing() -> None:
    (one,) = costs(Shape(1000, 8, 8, 64), 1)
    assert one.exchanged == one.passed == one.waiting == one.copying == 0


def test_the_mesh_for_many_devices(run: Run) -> None:
    data = run("parallel-plan", "--devices", "64", "--tokens", "1000000", "--heads", "24", "--json").data
    best, *rest = data["meshes"]
    assert (best["ring"], best["ulysses"]) == (8, 8)
    assert all(best["total_ms"] <= one["total_ms"] for one in rest)
    assert {one["ring"] * one["ulysses"] for one in data["meshes"]} == {64}
    lonely = next(one for one in rest if one["ulysses"] == 64)
    assert lonely["ranks_without_a_head"] == 40


def test_it_says_what_to_take(run: Run) -> None:
    said = run("parallel-plan", "--devices", "8", "--tokens", "75600", "--heads", "24", "--train").out
    assert "Take init_mesh(ring=1, ulysses=8)" in said


def test_copies_are_hidden_behind_kernels_and_what_is_sent_is_not(run: Run) -> None:
    shape = Shape(75_600, 24, 24, 128)
    sent, copied = (cost(shape, 4, 1, Machine(copies=copies)) for copies in (False, True))
    assert sent.waiting == pytest.approx(sent.passed / 220e9)
    assert copied.waiting == 0
    assert cost(shape, 4, 1, Machine(copies=True, within=1.0)).waiting > 0  # a kernel lasts only so long
    words = ("parallel-plan", "--devices", "4", "--tokens", "75600", "--heads", "24")
    assert "Take init_mesh(ring=1, ulysses=4)" in run(*words).out
    assert "Take init_mesh(ring=4, ulysses=1)" in run(*words, "--copies").out


def test_heads_that_do_not_go_together(run: Run) -> None:
    words = ("parallel-plan", "--devices", "8", "--tokens", "100", "--heads", "24", "--kv-heads", "5")
    found = run(*words)
    assert found.code == 2
    assert "--heads 24 is no multiple of --kv-heads 5" in found.err
