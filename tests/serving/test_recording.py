"""The contract of recorded steps: planted violations of each kind are named with their operator and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyattn.errors import GraphError, InvalidInputError
from polyattn.serving.graphs.capture_checks import READS, WAITS
from polyattn.serving.graphs.graphs import validate_static


class Step:
    """Static buffers of a step, a host length, and memory that a bad step may keep."""

    def __init__(self) -> None:
        self.x = torch.arange(8.0)
        self.lens = torch.tensor([3, 5])
        self.out = torch.zeros(8)
        self.small = torch.zeros(2)
        self.length = 4
        self.kept: Any = None


def nothing() -> None:
    pass


def found(bad: Callable[[Step], Any], stage: str) -> list[str]:
    """The violations that are reported when `bad` is part of a stage."""
    step = Step()

    def good() -> Tensor:
        return torch.add(step.x, 1, out=step.out)

    def with_bad() -> Tensor:
        bad(step)
        return good()

    prepare, replay = (with_bad, good) if stage == "prepare" else (nothing, with_bad)
    with pytest.raises(GraphError) as caught:
        validate_static(prepare, replay, plans=[nothing, nothing])
    assert all(sentence in str(caught.value) for sentence in caught.value.violations)
    return caught.value.violations


def here(function: Callable[..., Any]) -> str:
    """The line of a one-line function, which is the line of its body."""
    return f"{__file__}:{function.__code__.co_firstlineno}"


SYNCS: dict[str, tuple[Callable[[Step], Any], str, str]] = {
    # name -> (bad code, what is named, why)
    "item": (lambda step: step.x[0].item(), "aten._local_scalar_dense.default", "brings a value"),
    "int": (lambda step: int(step.lens[0]), "aten._local_scalar_dense.default", "brings a value"),
    "bool": (lambda step: bool(step.x[0]), "aten._local_scalar_dense.default", "brings a value"),
    "slice by a tensor": (lambda step: step.x[: step.lens[0]], "aten._local_scalar_dense.default", "brings a value"),
    "tolist": (lambda step: step.lens.tolist(), "Tensor.tolist", "reads a tensor on the host"),
    "cpu": (lambda step: step.lens.cpu(), "Tensor.cpu", "reads a tensor on the host"),
    "numpy": (lambda step: step.x.numpy(), "Tensor.numpy", "reads a tensor on the host"),
    "asarray": (lambda step: np.asarray(step.x), "Tensor.__array__", "reads a tensor on the host"),
    "format": (lambda step: f"{step.x[:1]}", "Tensor.__format__", "reads a tensor on the host"),
    "repr": (lambda step: repr(step.x), "Tensor.__repr__", "reads a tensor on the host"),
    "equal": (lambda step: torch.equal(step.x, step.out), "aten.equal.default", "brings a value"),
    "allclose": (lambda step: torch.allclose(step.x, step.out), "aten.allclose.default", "brings a value"),
    "nonzero": (lambda step: step.x.nonzero(), "aten.nonzero.default", "brings a value"),
    "where": (lambda step: torch.where(step.x > 2), "aten.nonzero.default", "brings a value"),
    "unique": (lambda step: torch.unique(step.x), "aten._unique2.default", "brings a value"),
    "masked_select": (lambda step: step.x.masked_select(step.x > 2), "aten.masked_select.default", "brings a value"),
    "mask as an index": (lambda step: step.x[step.x > 2], "aten.index.Tensor", "mask as an index"),
    "mask assigned": (lambda step: step.x.index_put_((step.x > 9,), step.x[0]), "aten.index_put_", "mask as an index"),
    "repeat": (lambda step: step.x[:2].repeat_interleave(step.lens), "aten.repeat_interleave.Tensor", "output_size"),
    "bincount": (lambda step: torch.bincount(step.lens), "aten.bincount.default", "brings a value"),
    "list": (lambda step: torch.tensor([1, 2]), "aten.lift_fresh.default", "makes a tensor of a list"),
}


@pytest.mark.parametrize("stage", ["prepare", "replay"])
@pytest.mark.parametrize("name", SYNCS)
def test_waiting_for_the_device_is_seen(name: str, stage: str) -> None:
    bad, operator, why = SYNCS[name]
    sentences = found(bad, stage)
    assert any(
        sentence.startswith(f"{stage}: {operator}") and why in sentence and here(bad) in sentence
        for sentence in sentences
    ), sentences


def test_every_read_of_the_list_is_planted() -> None:
    assert {operator.split(".")[1] for _, operator, _ in SYNCS.values() if operator.startswith("Tensor.")} == READS


def test_every_waiting_operator_exists() -> None:
    # Those of the composite kind never reach a dispatcher's mode, but cost nothing here.
    missing = {name for name in WAITS if not hasattr(torch.ops.aten, name)}
    assert not missing


def keep(step: Step) -> None:
    step.kept = step.x + 1


def keep_view(step: Step) -> None:
    step.kept = torch.zeros(3, 4)[1]


def cycle(step: Step) -> None:
    loop: list[Any] = [step.x * 2]
    loop.append(loop)


def grow(step: Step) -> None:
    torch.add(step.x, 1, out=step.small.resize_(0))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("stage", ["prepare", "replay"])
@pytest.mark.parametrize(
    "bad, operator", [(keep, "aten.add.Tensor"), (keep_view, "aten.zeros.default")], ids=["result", "view"]
)
def test_memory_that_lasts_is_seen(bad: Callable[[Step], Any], operator: str, stage: str) -> None:
    line = f"{__file__}:{bad.__code__.co_firstlineno + 1}"
    sentences = found(bad, stage)
    assert any(
        sentence.startswith(f"{stage}: {operator} at {line} allocated") and "still held" in sentence
        for sentence in sentences
    ), sentences


def test_an_argument_that_grows_is_seen() -> None:
    line = f"{__file__}:{grow.__code__.co_firstlineno + 1}"
    step = Step()

    def replay() -> None:
        step.small = torch.zeros(2)
        grow(step)

    with pytest.raises(GraphError) as caught:
        validate_static(nothing, replay, plans=[nothing, nothing])
    assert any(f"aten.add.out at {line} gave an argument new memory" in s for s in caught.value.violations)


def test_temporaries_and_returned_results_are_no_violation() -> None:
    step = Step()

    def replay() -> tuple[Tensor, dict[str, Tensor]]:
        temporary = step.x * 2
        cycle(step)
        return temporary.softmax(0), {"more": temporary[None] + 1}

    validate_static(lambda: step.out.copy_(step.x * 3), replay, plans=[nothing, nothing, nothing])


def test_what_is_made_on_first_use_is_no_violation() -> None:
    step = Step()

    def prepare() -> None:
        if step.kept is None:
            step.kept = torch.zeros(8)
        torch.mul(step.x, 2, out=step.kept)

    validate_static(prepare, lambda: step.kept + 1, plans=[nothing, nothing])


def test_a_buffer_that_a_plan_replaces_is_seen() -> None:
    step = Step()

    def plan() -> None:
        step.x = torch.arange(8.0)

    with pytest.raises(
        GraphError, match="in other memory than was recorded: it was replaced, not written in place"
    ) as e:
        validate_static(nothing, lambda: step.x * 2, plans=[nothing, plan])
    assert "replay: aten.mul.Tensor at" in e.value.violations[0]


def test_a_length_in_the_graph_is_seen() -> None:
    step = Step()

    def longer() -> None:
        step.length = 5

    with pytest.raises(GraphError, match="has the host value 5 as argument 3; recorded was 4"):
        validate_static(nothing, lambda: step.x[: step.length] * 2, plans=[nothing, longer])

    shapes = Step()
    with pytest.raises(GraphError, match=r"tensor \(3,\) torch.float32 .*; recorded was \(2,\) torch.float32"):
        validate_static(nothing, lambda: shapes.small * 2, plans=[nothing, lambda: shapes.small.resize_(3)])


def test_another_way_through_the_code_is_seen() -> None:
    step = Step()

    def longer() -> None:
        step.length += 1

    with pytest.raises(GraphError, match="host code took another way"):
        validate_static(nothing, lambda: step.x.sin() if step.length % 2 else step.x.cos(), plans=[longer, longer])
    with pytest.raises(
        GraphError, match=r"1 operators ran where 2 were recorded|2 operators ran where 1 were recorded"
    ):
        validate_static(nothing, lambda: (step.x.sin(), step.length % 2 and step.x.sin()), plans=[longer, longer])


def test_copies_within_the_device_are_fine() -> None:
    step = Step()
    validate_static(
        lambda: step.out.copy_(step.x),
        lambda: step.out.to(torch.float64).repeat_interleave(step.lens.repeat(4), output_size=32),
        plans=[nothing, nothing],
    )


class Elsewhere:
    """Stands for an operator: copies between devices are judged by their arguments."""

    _overloadname = "default"


@pytest.mark.parametrize(
    "name, args, kwargs, why",
    [
        ("_to_copy", ("meta",), {"device": torch.device("cpu")}, "copies from meta to the host"),
        ("copy_", ("cpu", "meta"), {"non_blocking": True}, "copies from meta to the host"),
        ("copy_", ("meta", "cpu"), {"non_blocking": True}, "use pinned memory"),
        ("_to_copy", ("cpu",), {"device": torch.device("meta")}, "use pinned memory"),
        ("_to_copy", ("cpu",), {"dtype": torch.float64}, ""),
        ("copy_", ("meta", "meta"), {}, ""),
    ],
)
def test_copies_between_devices(name: str, args: tuple[str, ...], kwargs: dict[str, Any], why: str) -> None:
    from polyattn.serving.graphs.capture_checks import _waits

    tensors = tuple(torch.zeros(2, device=device) for device in args)
    reason = _waits(name, Elsewhere, tensors, kwargs)
    assert why in reason
    assert bool(why) == bool(reason)


def test_violations_are_reported_once_and_together() -> None:
    def bad(step: Step) -> None:
        for _ in range(3):
            step.x[0].item()
        step.kept = step.x + 1

    sentences = found(bad, "replay")
    assert len(sentences) == 2, sentences


def test_one_plan_shows_too_little() -> None:
    with pytest.raises(InvalidInputError, match="plans has 1; two steps or more are needed"):
        validate_static(nothing, nothing, plans=[nothing])
