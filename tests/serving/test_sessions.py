"""Sessions of backends that plan: who shares one, what it is given, and that recorded steps keep still."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn.backends import paged_torch_native
from polyattn.errors import GraphError, InvalidInputError, UnsupportedRequestError
from polyattn.semantics import paged_kv
from polyattn.serving.attention import backend
from polyattn.serving.attention.workspace import Limits, Workspaces
from polyattn.serving.graphs.graphs import FakeGraph
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.tree import DraftTree

from .rig import LIMITS, Rig, decoder

EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY

WINDOWS = [AttentionLayer(i, 4, 2, 16, window=window) for i, window in enumerate((-1, 5, -1, 5, -1))]


def test_layers_that_ask_the_same_share_a_session(toys: Any) -> None:
    rig = Rig(WINDOWS, backend="toy")
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 9, b: 4})
    assert [(s.request.window[0], s.plans, s.prepares, s.forwards) for s in toys] == [(-1, 1, 1, 3), (5, 1, 1, 2)]
    rig.step(DECODE, {a: 1, b: 1})
    rig.step(DECODE, {a: 1, b: 1})
    decoding = [(s.request.phase, s.request.window[0], s.plans, s.forwards) for s in toys[2:]]
    assert decoding == [("decode", -1, 2, 6), ("decode", 5, 2, 4)]
    assert [s.plans for s in toys[:2]] == [1, 1], "a phase that does not run is not planned"


def test_layers_of_one_group_that_ask_otherwise_do_not(toys: Any) -> None:
    rig = Rig([AttentionLayer(0, 4, 2, 16), AttentionLayer(1, 8, 2, 16), AttentionLayer(2, 4, 2, 16)], backend="toy")
    rig.step(EXTEND, {rig.add()[0]: 3})
    assert [(s.request.heads, s.forwards) for s in toys] == [(4, 2), (8, 1)]


def test_a_session_of_a_sliding_group_plans_the_pages_its_layers_see(toys: Any) -> None:
    rig = Rig(WINDOWS, backend="toy")
    (row,) = rig.add()
    rig.step(EXTEND, {row: 40})
    rig.step(DECODE, {row: 1})
    full, sliding = toys[2:]
    assert int(full.step.seq_lens[0]) == 41
    assert int(sliding.step.seq_lens[0]) == 41 - 32, "pages of 4: from the first that key 40 - 5 is in"


def test_a_layer_that_writes_itself_reads_without_its_session_when_it_is_not_to_write(toys: Any) -> None:
    rig = Rig(decoder(), backend="toy_saves")
    (row,) = rig.add()
    rig.step(EXTEND, {row: 3})
    assert toys[0].request.save_kv_cache is True
    rig.step(EXTEND, {row: 1}, save=False)
    assert toys[0].forwards == 2


def test_a_layer_without_new_keys_reads_by_the_plan_of_its_step(toys: Any) -> None:
    """As those that share the cache of another layer do: whether or not its kernel writes what it is given."""
    for number, name in enumerate(("toy", "toy_saves")):
        rig = Rig(decoder(), backend=name)
        (row,) = rig.add()
        rig.step(EXTEND, {row: 3})
        before = toys[number].forwards
        query = torch.randn(3, rig.layers[0].heads, rig.layers[0].head_dim)
        rig.backend.forward(query, None, None, rig.layers[0])
        assert toys[number].forwards == before + 1


def recorded_rig(**arguments: Any) -> Rig:
    rig = Rig(WINDOWS, **{"backend": "toy", **arguments})
    rig.backend.init_cuda_graph_state(4, 16)
    return rig


def test_a_replay_reads_what_the_capture_read(toys: Any) -> None:
    """Per size one session for each request; its tables stay where they are, and the results are the eager ones."""
    rig = recorded_rig()
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 9, b: 4})
    rig.step(DECODE, {a: 1, b: 1}, recorded="capture", padding=2)
    addresses = [table.data_ptr() for table in tables(rig)]
    session = next(s for s in toys if s.slot.recorded)
    assert (session.slot.max_sequences, session.slot.max_tokens, session.slot.max_pages) == (4, 4, 16)
    assert rig.backend._any[0].step.tables.max_seqlen_k == 64, "a length of the step would be in the graph"
    for new in ({a: 1, b: 1}, {b: 1}, {b: 1, a: 1}):
        rig.step(DECODE, new, recorded="replay", padding=4 - len(new))
        assert [table.data_ptr() for table in tables(rig)] == addresses
    assert [s.plans for s in toys if s.slot.recorded] == [4, 4]
    rig.step(EXTEND, {a: 2})
    rig.step(DECODE, {a: 1}, recorded="capture")
    sizes = {(s.slot.recorded, s.step.sequences) for s in toys if s.request.phase == "decode"}
    assert sizes == {(True, 4), (True, 1)}, "another size is another plan slot"


def tables(rig: Rig) -> list[torch.Tensor]:
    found = [call.step.keywords["tables"] for call in rig.backend._any.values()]
    return [table for tables in found for table in (tables.page_table, tables.seq_lens)]


def test_drafts_are_verified_in_recorded_steps(toys: Any) -> None:
    rig = recorded_rig(topk=2)
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 9, b: 4})
    for how, parents in (("capture", [[-1, 0, 0, 1]] * 2), ("replay", [[-1, 0, 1, 2], [-1, 0, 0, 0]])):
        tree = DraftTree.from_parents(parents)
        rig.step(VERIFY, {a: 4, b: 4}, tree=tree, recorded=how, padding=1)
    assert [s.plans for s in toys if s.request.phase == "verify"] == [2, 2]


def test_recorded_steps_need_their_buffers() -> None:
    rig = Rig(decoder())
    (row,) = rig.add()
    rig.give({row: 1})
    with pytest.raises(InvalidInputError, match="call init_cuda_graph_state"):
        rig.backend.init_forward_metadata_capture_cuda_graph(rig.batch_of(DECODE, {row: 1}))
    rig.backend.init_cuda_graph_state(2, 2)
    batch = ForwardBatch(DECODE, [row], [1], [1], padding=2)
    with pytest.raises(InvalidInputError, match="3 rows, padding included, and these buffers have room for 2"):
        rig.backend.init_forward_metadata_capture_cuda_graph(batch)


def test_a_prepare_that_was_recorded_is_not_run_before_replays(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = recorded_rig()
    (row,) = rig.add()
    rig.step(DECODE, {row: 1}, recorded="capture")
    batch = rig.batch
    assert batch is not None
    session = toys[0]

    def prepares(how: str) -> int:
        before = session.prepares
        getattr(rig.backend, f"init_forward_metadata_{how}_cuda_graph")(batch)
        return int(session.prepares - before)

    assert prepares("replay") == 1, "nothing was recorded"
    with monkeypatch.context() as capture:
        capture.setattr(backend, "capturing", lambda kind: True)
        rig.backend.prepare()
    assert prepares("replay") == 0
    with pytest.raises(InvalidInputError, match="no step is planned and prepared"):
        rig.backend.forward(*(torch.zeros(1, heads, 16) for heads in (4, 2, 2)), rig.layers[0])
    assert prepares("capture") == 1
    assert prepares("replay") == 1, "the new capture has no prepare"


def test_recorded_phases_need_backends_that_can_be_recorded(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode always, prefill's backend where it verifies, and what else a runner records when it does."""
    monkeypatch.setattr(backend, "_has_graphs", lambda device: True)

    def rig(prefill: str, decode: str, **more: Any) -> Rig:
        made = Rig(decoder(), prefill_backend=prefill, decode_backend=decode, **more)
        made.backend.init_cuda_graph_state(4, 16)
        return made

    for arguments in (("toy_saves", "toy"), ("toy", "toy"), ("toy", "toy_saves", 1)):
        prefill, decode, topk = (*arguments, 0)[:3]
        words = f"--prefill-attention-backend {prefill}.*graph_capture='session' is not declared"
        with pytest.raises(UnsupportedRequestError, match=words):
            rig(prefill, decode, topk=topk)
    rig("toy", "toy_saves", topk=1, verify="decode")
    made = rig("toy", "toy_saves")
    assert [found.request.graph_capture for found in made.backend.explain().values()] == [False, "session"]
    (row,) = made.add()
    for _ in range(2):
        with pytest.raises(UnsupportedRequestError, match="graph_capture"):
            made.step(EXTEND, {row: 3}, recorded="capture")
    made = rig("toy_saves", "toy_saves")
    (row,) = made.add()
    made.step(EXTEND, {row: 3})
    made.step(EXTEND, {row: 3}, recorded="capture")
    assert [found.request.graph_capture for found in made.backend.explain().values()] == ["session", "session"]
    made.step(EXTEND, {row: 3})


# Workspaces ----------------------------------------------------------------------------------------------------------


def test_a_workspace_belongs_to_one_session_of_one_slot() -> None:
    spaces = Workspaces(torch.device("cpu"))
    slots = [spaces.slot(plan, session, LIMITS, 16) for plan in ("eager", "graph") for session in (1, 2)]
    memory = [slot.workspace("x", 100) for slot in slots]
    assert len({m.data_ptr() for m in memory}) == 4
    assert all(m.data_ptr() % 256 == 0 and m.dtype == torch.uint8 and m.shape == (100,) for m in memory)
    assert slots[0].workspace("x", 60).data_ptr() == memory[0].data_ptr(), "the same name gives the same memory"
    assert slots[0].workspace("y", 60).data_ptr() != memory[0].data_ptr()
    assert spaces.nbytes == 460


def test_a_workspace_grows_until_its_steps_are_recorded() -> None:
    spaces = Workspaces(torch.device("cpu"))
    slot = spaces.slot("graph", 0, LIMITS, 16, recorded=True)
    assert slot.workspace("x", 10).shape == (10,)
    assert slot.workspace("x", 500).shape == (500,)
    spaces.fix("graph")
    assert slot.workspace("x", 500).shape == (500,)
    for name in ("x", "y"):
        with pytest.raises(InvalidInputError, match=f"workspace '{name}' of a recorded step is asked for 501 bytes"):
            slot.workspace(name, 501)


def test_a_recorded_session_cannot_ask_for_more_at_replay(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = recorded_rig()
    (row,) = rig.add()
    rig.step(DECODE, {row: 1}, recorded="capture")
    kind = type(toys[0])
    monkeypatch.setattr(kind, "plan", lambda self, step: self.slot.workspace("stamp", 4096))
    with pytest.raises(InvalidInputError, match="it may not move after the capture"):
        rig.step(DECODE, {row: 1}, recorded="replay")


@pytest.mark.parametrize(
    "numbers, words",
    [
        ((0, 1, 1), "max_sequences=0; a whole number of at least 1"),
        ((1, 1.5, 1), "max_tokens=1.5"),
        ((1, 1, True), "max_seqlen=True"),
        ((1, 1, 1, -1), "padding_seq_len=-1; a whole number of at least 0"),
    ],
)
def test_limits_are_numbers(numbers: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Limits(*numbers)


@pytest.mark.parametrize("window", [-1, 5])
def test_torch_native_reads_lengths_and_finds_places_once_a_step(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of layers: none of them reads a tensor on the host or looks up where tokens are."""
    rig = Rig(decoder(3, window=window), backend="torch_native")
    counts = dict.fromkeys(("places", "tokens", "read", "divided"), 0)

    def counted(where: Any, name: str, what: str) -> None:
        plain = getattr(where, name)

        def count(*given: Any, **more: Any) -> Any:
            counts[what] += 1
            return plain(*given, **more)

        monkeypatch.setattr(where, name, count)

    counted(paged_torch_native, "_planned", "places")
    counted(paged_kv.Tokens, "of", "tokens")
    rows = rig.add(3)
    rig.step(EXTEND, {rows[0]: 9, rows[1]: 1, rows[2]: 4})
    rig.step(DECODE, dict.fromkeys(rows, 1))
    assert (counts["places"], counts["tokens"]) == (2, 0)
    rig.give(dict.fromkeys(rows, 1))
    rig.backend.init_forward_metadata(rig.batch_of(DECODE, dict.fromkeys(rows, 1)))
    counted(torch.Tensor, "tolist", "read")
    counted(torch.Tensor, "item", "read")
    counted(torch.Tensor, "__floordiv__", "divided")
    for layer in rig.layers:
        rig.backend.forward(*(torch.randn(3, heads, 16) for heads in (4, 2, 2)), layer)
    assert (counts["places"], counts["read"], counts["divided"]) == (3, 0, 0)


def test_torch_native_says_of_recorded_steps_that_it_reads_lengths() -> None:
    """What it finds in a plan would stay in the recording: there each layer reads the device, which a watch sees."""
    rig = Rig(decoder(1), backend="torch_native")
    rig.backend.init_cuda_graph_state(2, 4)
    (row,) = rig.add()
    rig.step(EXTEND, {row: 5})
    rig.step(DECODE, {row: 1}, recorded="capture")
    q, k, v = (torch.randn(1, heads, 16) for heads in (4, 2, 2))
    rig.give({row: 1})
    rig.backend.init_forward_metadata_capture_cuda_graph(rig.batch_of(DECODE, {row: 1}))
    with pytest.raises(GraphError, match=r"tolist|_local_scalar_dense"):
        FakeGraph(warm_up=0).capture(lambda: rig.backend.forward(q, k, v, rig.layers[0]))
