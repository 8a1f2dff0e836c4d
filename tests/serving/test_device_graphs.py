"""Graphs: a recording is replayed on what is in its buffers; what a device graph would get wrong is refused."""

from __future__ import annotations

import pytest
import torch

from polyattn.errors import GraphError
from polyattn.serving.graphs.graphs import CudaGraph, DeviceGraph, FakeGraph, graphs_of


@pytest.fixture(params=[(FakeGraph, "cpu"), (CudaGraph, "cuda")], ids=["fake", "cuda"])
def place(request: pytest.FixtureRequest) -> tuple[type[DeviceGraph], str]:
    """A kind of graph, and where its tensors are."""
    if request.param[1] == "cuda":
        request.getfixturevalue("gpu")
    return request.param  # type: ignore[no-any-return]


def test_replay_writes_the_results_anew(place: tuple[type[DeviceGraph], str]) -> None:
    kind, device = place
    x = torch.zeros(4, device=device)
    weight = torch.randn(4, 4, device=device)
    graph = kind()
    out = graph.capture(lambda: {"y": (x[None] @ weight).relu(), "twice": [x * 2]})
    for value in (1.0, -3.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(out["y"], (x[None] @ weight).relu())
        assert torch.equal(out["twice"][0], x * 2)


def test_a_step_that_waits_is_not_recorded(place: tuple[type[DeviceGraph], str]) -> None:
    kind, device = place
    x = torch.ones(4, device=device)
    with pytest.raises(GraphError, match=r"could not be recorded|cannot be recorded"):
        kind().capture(lambda: x * x.sum().item())


def test_a_buffer_that_moved_is_refused() -> None:
    buffers = [torch.ones(4)]
    graph = FakeGraph()
    graph.capture(lambda: buffers[0] + 1)
    buffers[0].fill_(3)
    graph.replay()
    buffers[0] = torch.ones(4)
    with pytest.raises(GraphError, match=r"aten.add.Tensor at .*test_device_graphs.py:\d+ reads as argument 0"):
        graph.replay()


def test_memory_that_was_given_back_and_taken_again_is_refused() -> None:
    # The allocator often returns the same address; the storage is another one all the same.
    buffers = [torch.ones(4)]
    graph = FakeGraph()
    graph.capture(lambda: buffers[0] + 1)
    buffers.clear()
    buffers.append(torch.ones(4))
    with pytest.raises(GraphError, match="in other memory than was recorded"):
        graph.replay()


def test_a_host_value_that_changed_is_refused() -> None:
    x, scale = torch.ones(4), [2.0]
    graph = FakeGraph()
    out = graph.capture(lambda: x * scale[0])
    scale[0] = 3.0
    with pytest.raises(GraphError, match=r"the recording does not hold for this step: replay: aten\.mul\.Tensor"):
        graph.replay()
    assert torch.equal(out, x * 2)


def test_waiting_in_a_replay_is_refused() -> None:
    x, wait = torch.ones(4), []
    graph = FakeGraph()
    graph.capture(lambda: (x * 2, [x.tolist() for _ in wait])[0])
    wait.append(1)
    with pytest.raises(GraphError, match=r"Tensor.tolist at .* reads a tensor on the host"):
        graph.replay()


def test_what_cannot_be_watched_is_said_so() -> None:
    """As torch does where it would compile under a watch."""
    runs = iter([None, NotImplementedError("no rule for flex_attention")])

    def function() -> torch.Tensor:
        if (error := next(runs)) is not None:
            raise error
        return torch.ones(1)

    with pytest.raises(
        GraphError, match=r"cannot be watched: no rule for flex_attention.*choose another backend"
    ) as exc:
        FakeGraph().capture(function)
    assert isinstance(exc.value.__cause__, NotImplementedError)


def test_a_replay_without_a_recording_is_refused() -> None:
    with pytest.raises(GraphError, match=r"replay\(\) of a graph without a recording"):
        FakeGraph().replay()


def test_a_cpu_has_no_graphs() -> None:
    assert graphs_of(torch.device("cpu")) is None


@pytest.mark.usefixtures("gpu")
def test_graphs_of_a_device_share_their_memory() -> None:
    make = graphs_of(torch.device("cuda"))
    assert make is not None
    x = torch.ones(4, device="cuda")
    first, second = make(), make()
    one = first.capture(lambda: x + 1)
    two = second.capture(lambda: x + 2)
    first.replay()
    assert one.tolist() == [2.0] * 4
    second.replay()
    assert two.tolist() == [3.0] * 4
