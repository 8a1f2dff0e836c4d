"""States by request and by run: one life cycle, shown on a small recurrent layer with a convolution before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.contract import Keep
from polyattn.errors import InvalidInputError
from polyattn.semantics.states import RequestStates, RunStates, state_bytes
from polyattn.serving import FakeGraph

HEADS, DIM, TAIL = 2, 4, 2
KEEPS = {
    layer: [Keep("state", "request", (HEADS, DIM, DIM), "float64"), Keep("conv", "request", (TAIL, HEADS * DIM))]
    for layer in (0, 3)
}


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


def made(requests: int = 4, **more: Any) -> RequestStates:
    return RequestStates(KEEPS, requests, dtype=torch.float64, **more)


def step(state: Tensor, tail: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token [HEADS * DIM] of a recurrent layer: a convolution of the last tokens, then a decayed outer product."""
    seen = torch.cat([tail, x[None]])
    mixed = (seen * torch.tensor([0.2, 0.3, 1.0], dtype=x.dtype)[:, None]).sum(0).view(HEADS, DIM)
    state = state * 0.9 + mixed[:, :, None] * mixed[:, None, :]
    return torch.einsum("hij,hj->hi", state, mixed).flatten(), state, seen[1:]


def run(states: RequestStates, slots: Sequence[int], tokens: Tensor, layer: int = 0) -> Tensor:
    """A token for each slot; the outputs."""
    outs = []
    state, conv = states.tensor(layer, "state"), states.tensor(layer, "conv")
    for slot, x in zip(slots, tokens, strict=True):
        out, state[slot], conv[slot] = step(state[slot], conv[slot], x)
        outs.append(out)
    return torch.stack(outs)


def alone(tokens: Tensor) -> Tensor:
    """Outputs of one sequence [T, HEADS * DIM] from zeros."""
    state, tail = tokens.new_zeros(HEADS, DIM, DIM), tokens.new_zeros(TAIL, HEADS * DIM)
    outs = []
    for x in tokens:
        out, state, tail = step(state, tail, x)
        outs.append(out)
    return torch.stack(outs)


def tokens(count: int) -> Tensor:
    return torch.randn(count, HEADS * DIM, dtype=torch.float64)


def test_requests_side_by_side_are_as_if_alone() -> None:
    states, a, b = made(), tokens(5), tokens(5)
    states.allocate(2)
    states.allocate(0)
    outs = [run(states, [2, 0], torch.stack(pair)) for pair in zip(a, b, strict=True)]
    assert torch.equal(torch.stack([out[0] for out in outs]), alone(a))
    assert torch.equal(torch.stack([out[1] for out in outs]), alone(b))
    assert not states.tensor(3, "state").any(), "each layer has its own"


def test_a_slot_begins_with_zeros_whatever_was_in_it() -> None:
    states, text = made(), tokens(3)
    states.allocate(1)
    run(states, [1], text[:1])
    states.drop(1)
    assert states.live == []
    states.allocate(1)
    assert torch.equal(torch.cat([run(states, [1], x[None]) for x in text]), alone(text))


def test_a_slot_may_begin_with_a_snapshot() -> None:
    states, text = made(), tokens(6)
    states.allocate(0)
    for x in text[:4]:
        run(states, [0], x[None])
    kept = states.snapshot(0)
    run(states, [0], text[4:5])
    states.allocate(3, kept)
    again = torch.cat([run(states, [3], x[None]) for x in text[4:]])
    assert torch.equal(again, alone(text)[4:])
    states.reset([0, 3], kept)
    assert all(torch.equal(states.snapshot(slot)[key], value) for slot in (0, 3) for key, value in kept.items())
    states.reset([0])
    assert not any(value.any() for value in states.snapshot(0).values())
    assert any(value.any() for value in states.snapshot(3).values())


def test_a_fork_goes_its_own_way() -> None:
    states, text, other = made(), tokens(6), tokens(3)
    states.allocate(0)
    for x in text[:3]:
        run(states, [0], x[None])
    states.fork(0, 1)
    both = [run(states, [0, 1], torch.stack(pair)) for pair in zip(text[3:], other, strict=True)]
    assert torch.equal(torch.stack([out[0] for out in both]), alone(text)[3:])
    assert torch.equal(torch.stack([out[1] for out in both]), alone(torch.cat([text[:3], other]))[3:])


@pytest.mark.parametrize("where", ["host", "device"])
def test_commit_takes_the_state_after_the_last_accepted_node(where: str) -> None:
    """Commit equals replay: state and tail of the convolution together, in all layers, and of each request its own."""
    states, text, drafts = made(drafts=3), tokens(2), tokens(3)
    for slot in (0, 1, 3):
        states.allocate(slot)
    for layer in KEEPS:
        for slot in (0, 1, 3):
            for x in text:
                run(states, [slot], x[None], layer)
            kept = states.snapshot(slot)
            state, tail = kept[layer, "state"], kept[layer, "conv"]
            for node, x in enumerate(drafts):
                _, state, tail = step(state, tail, x)
                states.drafted(layer, "state")[slot, node], states.drafted(layer, "conv")[slot, node] = state, tail
    before = states.snapshot(3)
    picked: Any = ([0, 1, 3, -1], [2, 0, -1, 1])
    states.commit(*(map(torch.tensor, picked) if where == "device" else picked))
    for slot, count in ((0, 3), (1, 1), (3, 0)):
        for layer in KEEPS:
            replay = made(1)
            replay.allocate(0)
            for x in (*text, *drafts[:count]):
                run(replay, [0], x[None], layer)
            for name in ("state", "conv"):
                assert torch.equal(states.tensor(layer, name)[slot], replay.tensor(layer, name)[0])
    assert all(torch.equal(before[key], value) for key, value in states.snapshot(3).items())


def test_a_graph_may_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers of each replay, which nobody reads on the host; those past the end become the last one."""
    monkeypatch.setattr("polyattn.semantics.states.contents_readable", lambda tensor: False)
    states = made(3, drafts=2)
    slots, nodes = torch.tensor([0, 2]), torch.tensor([1, -1])
    for slot in (0, 2):
        states.allocate(slot)
        states.drafted(0, "conv")[slot] = torch.tensor([1.0, 2.0])[:, None, None] + slot
    graph = FakeGraph(warm_up=0)
    graph.capture(lambda: states.commit(slots, nodes))
    conv = states.tensor(0, "conv")
    assert conv[:3].amax((1, 2)).tolist() == [2, 0, 0]
    slots.copy_(torch.tensor([2, -1]))
    nodes.copy_(torch.tensor([0, 7]))
    graph.replay()
    assert conv[:3].amax((1, 2)).tolist() == [2, 0, 3]


def test_padding_has_a_slot_that_no_request_has() -> None:
    states = made(2)
    assert states.padding == 2
    states.tensor(0, "state")[-1] = 7
    states.allocate(0)
    states.allocate(1)
    assert not any(value.any() for slot in (0, 1) for value in states.snapshot(slot).values())


@pytest.mark.parametrize("word", ["fp8_e4m3", "int8", "uint8", "int32", "bool", "bfloat16"])
def test_dtypes(word: str) -> None:
    states = RequestStates({0: [Keep("state", "request", (3,), word)]}, 2, drafts=2)
    tensor = states.tensor(0, "state")
    value = torch.tensor([1.0, 0.0, 1.0]).to(tensor.dtype)
    states.allocate(0, {(0, "state"): value})
    states.fork(0, 1)
    assert torch.equal(tensor[1].float(), value.float())
    states.drafted(0, "state")[1, 1] = torch.ones(3).to(tensor.dtype)
    states.commit([1], [1])
    assert torch.equal(tensor[1].float(), torch.ones(3))
    assert torch.equal(tensor[0].float(), value.float())
    states.reset([1])
    assert not tensor[1].float().any()


def test_bytes() -> None:
    states = made(3, drafts=2)
    one = 2 * 8 * (HEADS * DIM * DIM + TAIL * HEADS * DIM)
    assert state_bytes(KEEPS, torch.float64) == one
    assert states.nbytes == 4 * state_bytes(KEEPS, torch.float64, 2) == 4 * 3 * one
    assert made(3).nbytes == 4 * one


def test_states_are_written_in_any_mode() -> None:
    with torch.inference_mode():
        states = made(2, drafts=1)
        states.allocate(0)
    states.tensor(0, "state")[0] += 1
    with torch.inference_mode():
        states.fork(0, 1)
        states.commit([0], [0])
    assert states.tensor(0, "state")[1].all()


VALUE = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64)
REFUSED: list[tuple[Callable[[RequestStates], Any], str]] = [
    (lambda s: s.tensor(0, "sate"), r"layer 0 keeps no 'sate'\. Did you mean 'state'\? It keeps: state, conv"),
    (lambda s: s.drafted(0, "index"), "layer 0 keeps no 'index'"),
    (lambda s: s.tensor(1, "state"), r"layer 1 keeps nothing here; those that do: \[0, 3\]"),
    (lambda s: s.tensor([0], "state"), r"layer \[0\] keeps nothing here"),
    (lambda s: s.allocate(0), "slot 0 is in use: drop it first, or take another"),
    (lambda s: s.allocate(4), "slot 4 of 4; 0 to 3 are rows of the request table"),
    (lambda s: s.allocate(-1), "slot -1 of 4"),
    (lambda s: s.allocate(1, {"state": VALUE}), r"values has the key 'state'; each is \(layer, name of a keep\)"),
    (lambda s: s.allocate(1, {(0, "stat"): VALUE}), "keeps no 'stat'"),
    (
        lambda s: s.allocate(1, {(0, "state"): VALUE[0]}),
        r"layer 0: state is \[4, 4\] torch.float64 on cpu; \[2, 4, 4\] torch.float64 on cpu is needed, as",
    ),
    (lambda s: s.reset([0], {(0, "state"): VALUE.float()}), r"state is \[2, 4, 4\] torch.float32 on cpu; .*float64"),
    (lambda s: s.reset([0], {(0, "state"): 1.0}), "state is float; "),
    (lambda s: s.reset([0, 1]), "slot 1 is no request's: it was dropped, or never allocated. Slots in use: .0."),
    (lambda s: (s.drop(0), s.fork(0, 1)), "slot 0 is no request's: it was dropped"),
    (lambda s: s.fork(0, 0), "slot 0 is in use"),
    (lambda s: s.drop(2), "slot 2 is no request's"),
    (lambda s: s.snapshot(2), "slot 2 is no request's"),
    (lambda s: s.commit([0], [3]), "nodes has 3; the step has 3, so that 0 to 2 are allowed, or -1"),
    (lambda s: s.commit([0], torch.tensor([-2])), "nodes has -2; the step has 3"),
    (lambda s: s.commit([1], [0]), "slot 1 is no request's"),
    (lambda s: s.commit(torch.tensor([9]), torch.tensor([0])), "slot 9 is no request's"),
    (lambda s: s.commit([0], [0, 1]), "1 slots for 2 nodes; give one node for each slot"),
    (lambda s: s.commit([0.5], [0]), "slots has 0.5, a float; whole numbers are needed"),
    (lambda s: s.commit(torch.tensor([0], dtype=torch.int32), [0]), r"slots is \[1\] torch.int32 on cpu; int64 \[N\]"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_is_refused_changes_nothing(call: Callable[[RequestStates], Any], words: str) -> None:
    states = made(drafts=3)
    states.allocate(0)
    run(states, [0], tokens(1))
    before = [tensor.clone() for tensor in states._all]
    with pytest.raises(InvalidInputError, match=words):
        call(states)
    assert all(torch.equal(old, new) for old, new in zip(before, states._all, strict=True))


def test_states_of_drafts_are_there_where_there_are_drafts() -> None:
    states = made()
    states.allocate(0)
    with pytest.raises(InvalidInputError, match="states of drafts are asked for, and these were built without"):
        states.drafted(0, "state")
    with pytest.raises(InvalidInputError, match=r"commit picks one of the states .* built without: give the number"):
        states.commit([0], [0])


@pytest.mark.parametrize(
    ("keeps", "more", "words"),
    [
        ({0: [Keep("index", "token", (132,), "uint8")]}, {}, "no layer keeps anything by request: declare it"),
        ({}, {}, "no layer keeps anything by request"),
        ({0: [KEEPS[0][0]] * 2}, {}, "layer 0 keeps 'state' twice"),
        ({0: [Keep("state", "request", (4,), "fp4_e2m1")]}, {}, "dtype='fp4_e2m1' of a state, which has no scales"),
        (KEEPS, {"requests": 0}, "requests=0; a whole number of at least 1 is needed"),
        (KEEPS, {"drafts": -1}, "drafts=-1; a whole number of at least 0"),
        (KEEPS, {"requests": True}, "requests=True; a whole number"),
    ],
)
def test_what_makes_no_states(keeps: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        RequestStates(keeps, **{"requests": 4, **more})


# Runs -----------------------------------------------------------------------------------------------------------------

RUN = {
    0: [Keep("centroids", "run", (2, 3)), Keep("steps", "run", (1,), "int64")],
    1: [Keep("centroids", "run", (2, 3))],
}


def test_a_run_has_states_by_layer_and_branch() -> None:
    with RunStates(RUN, dtype=torch.bfloat16) as run:
        first = run.tensor(0, "centroids", "cond")
        assert first.dtype == torch.bfloat16
        assert not first.any()
        first += 1
        run.tensor(0, "steps", "cond").fill_(3)
        assert run.tensor(0, "centroids", "cond") is first
        assert not run.tensor(0, "centroids", "uncond").any()
        assert not run.tensor(1, "centroids", "cond").any()
        assert run.branches == ["cond", "uncond"]
        assert run.of(0, "cond") == {"centroids": first, "steps": run.tensor(0, "steps", "cond")}
        assert run.nbytes == 3 * 12 + 8


def test_the_life_of_a_branch() -> None:
    run = RunStates(RUN)
    run.tensor(0, "centroids").fill_(1)
    run.fork("", "try")
    run.tensor(0, "centroids", "try").fill_(2)
    run.tensor(1, "centroids", "try").fill_(5)
    assert run.tensor(0, "centroids").eq(1).all()
    kept = run.tensor(0, "centroids")
    run.tensor(0, "steps").fill_(9)
    run.commit("", "try")
    assert run.tensor(0, "centroids") is kept
    assert kept.eq(2).all()
    assert run.tensor(1, "centroids").eq(5).all()
    assert not run.tensor(0, "steps").any(), "what the fork did not have was not there when it was made"
    assert run.branches == [""]
    run.reset(values={(0, "centroids"): torch.full((2, 3), 4.0)})
    assert kept.eq(4).all()
    assert not run.tensor(1, "centroids").any()
    run.reset("new", {(1, "centroids"): torch.ones(2, 3)})
    assert run.tensor(1, "centroids", "new").all()
    run.drop("new")
    run.commit("", "")
    assert kept.eq(4).all()
    assert run.branches == [""]


def test_a_run_ends_once_and_for_all() -> None:
    run = RunStates(RUN)
    run.tensor(0, "centroids")
    with run:
        pass
    assert run.nbytes == 0
    for call in (
        lambda: run.tensor(0, "centroids"),
        lambda: run.reset(),
        lambda: run.fork("", "b"),
        lambda: run.commit("", "b"),
        lambda: run.drop(),
        lambda: run.drop("b"),
        run.__enter__,
    ):
        with pytest.raises(InvalidInputError, match="the run has ended and its states are gone: make new RunStates"):
            call()
    with RunStates(RUN) as run:
        run.drop()  # before its end


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.tensor(0, "centroid"), "layer 0 keeps no 'centroid'. Did you mean 'centroids'"),
        (lambda r: r.tensor(7, "centroids"), r"layer 7 keeps nothing here; those that do: \[0, 1\]"),
        (
            lambda r: r.fork("cnd", "b"),
            "there is no branch 'cnd' in this run: .* Did you mean 'cond'.* Known: .'cond'.",
        ),
        (lambda r: r.of(7), "layer 7 keeps nothing here"),
        (lambda r: r.fork("cond", "cond"), "branch 'cond' is there: drop it first, or take another name"),
        (lambda r: r.commit("cond", "b"), "there is no branch 'b'"),
        (lambda r: r.drop("b"), "there is no branch 'b'"),
        (lambda r: r.reset("cond", {(0, "centroids"): torch.ones(3, 2)}), r"centroids is \[3, 2\] .* \[2, 3\]"),
        (lambda r: r.reset("cond", {(0, "steps"): torch.ones(1)}), r"steps is \[1\] torch.float32 .* torch.int64"),
    ],
)
def test_what_a_run_refuses(call: Callable[[RunStates], Any], words: str) -> None:
    run = RunStates(RUN)
    run.tensor(0, "centroids", "cond").fill_(1)
    with pytest.raises(InvalidInputError, match=words):
        call(run)
    assert run.tensor(0, "centroids", "cond").all()


def test_what_makes_no_run() -> None:
    with pytest.raises(InvalidInputError, match="no layer keeps anything by run"):
        RunStates(KEEPS)
    with pytest.raises(InvalidInputError, match="dtype='fp4_e2m1' of a state"):
        RunStates({0: [Keep("a", "run", (2,), "fp4_e2m1")]})
