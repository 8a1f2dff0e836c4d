"""Recorded steps of a small model over real caches: a replay equals the same step run eagerly, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn.errors import GraphError, InvalidInputError
from polyattn.serving.attention.backend import AttentionBackend
from polyattn.serving.attention.workspace import Limits
from polyattn.serving.graphs.graphs import CudaGraph, FakeGraph, GraphRunner, batch_buckets, validate_static
from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.kv_cache.pool import KVCacheConfig, KVPool
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable
from polyattn.serving.step.tree import DraftTree

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
H, H_KV, D, E, V, LONGEST = 4, 2, 16, 32, 50, 64


class World:
    """A random model of two layers with its caches and request table; one layer has a window."""

    def __init__(
        self, device: str, backend: str | None, topk: int = 0, windows: tuple[int, ...] = (-1, 5), dtype: Any = "auto"
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).div_(shape[0] ** 0.5).to(device)

        self.device = torch.device(device)
        self.layers = [AttentionLayer(i, H, H_KV, D, window=window) for i, window in enumerate(windows)]
        self.weights = [(weight(E, (H + 2 * H_KV) * D), weight(H * D, E)) for _ in self.layers]
        self.words, self.places = weight(V, E) * 3, weight(LONGEST, E)
        self.pool = KVPool(self.layers, KVCacheConfig(dtype, page_size=4), 90, dtype=torch.float32, device=self.device)
        groups = [group.window for group in self.pool.groups]
        allocators = [PageAllocator(90) for _ in groups]
        self.table = RequestTable(16, LONGEST, 4, groups, allocators, self.device)
        self.backend = AttentionBackend(
            self.layers,
            self.pool,
            self.table,
            limits=Limits(max_sequences=16, max_tokens=128, max_seqlen=LONGEST),
            backend=backend,
            topk=topk,
        )

    def model(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.words[ids] + self.places[positions]
        for layer, (qkv, out) in zip(self.layers, self.weights, strict=True):
            q, k, v = (x @ qkv).view(-1, H + 2 * H_KV, D).split([H, H_KV, H_KV], 1)
            x = x + self.backend.forward(q, k, v, layer).reshape(-1, H * D) @ out
        return x @ self.words.T

    def rows(self, lengths: list[int]) -> list[int]:
        """New requests whose prompts have been run."""
        rows = [self.table.add() for _ in lengths]
        for row, length in zip(rows, lengths, strict=True):
            self.table.extend(row, length)
        batch = ForwardBatch(EXTEND, rows, lengths, lengths)
        self.eager(batch)
        return rows

    def inputs(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        positions = torch.tensor(batch.positions(), device=self.device)
        return (7 * positions + torch.arange(len(positions), device=self.device)) % V, positions

    def eager(self, batch: ForwardBatch) -> Tensor:
        self.backend.init_forward_metadata(batch)
        return self.model(*self.inputs(batch))

    def unrecorded(self, batch: ForwardBatch) -> Tensor:
        """The step as it is replayed, padded and planned into static buffers, run without a graph."""
        self.backend.init_cuda_graph_state(8, 32)
        self.backend.init_forward_metadata_replay_cuda_graph(batch)
        return self.model(*self.inputs(batch))

    def decode(self, rows: list[int]) -> ForwardBatch:
        """A decode step of these rows, with its slots."""
        for row in rows:
            self.table.extend(row, 1)
        return ForwardBatch(DECODE, rows, [self.table.length(row) for row in rows], [1] * len(rows))

    def caches(self) -> list[Tensor]:
        """All that is in the caches but the padding page."""
        found = []
        for layer in self.layers:
            cache = self.pool.cache(layer.layer_id)
            found += [cache.key_cache[1:].clone(), cache.value_cache[1:].clone()]
        return found


@pytest.fixture(params=["cpu", "cuda"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., World]]:
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    with torch.no_grad():
        yield lambda **more: World(request.param, "torch_sdpa", **more)


def runner(world: World, **more: Any) -> GraphRunner:
    graph = FakeGraph if world.device.type == "cpu" else None
    options = {"max_sequences": 8, "device": world.device, "graph": graph, **more}
    return GraphRunner(world.backend, world.model, **options)


def test_decode_is_replayed_and_equals_eager(make: Callable[..., World]) -> None:
    world, other = make(), make()
    graphs = runner(world)
    lengths = [3, 9, 14]
    rows, others = world.rows(lengths), other.rows(lengths)
    for _ in range(6):
        batch, same = world.decode(rows), other.decode(others)
        got = graphs.run(batch, *world.inputs(batch))
        padded = graphs.padded(same)
        assert padded.sequences == 4
        assert torch.equal(got, other.unrecorded(padded)[:3])
        for mine, theirs in zip(world.caches(), other.caches(), strict=True):
            assert torch.equal(mine, theirs)
    assert graphs.recorded == ((DECODE, 4),)
    assert not graphs.eager_steps


def test_batches_of_all_sizes(make: Callable[..., World]) -> None:
    world, other = make(), make()
    graphs = runner(world)
    graphs.capture()
    assert graphs.recorded == ((DECODE, 8), (DECODE, 4), (DECODE, 2), (DECODE, 1))
    lengths = [2, 3, 5, 7, 11, 13, 17]
    rows, others = world.rows(lengths), other.rows(lengths)
    for count in (7, 1, 3, 2, 5, 4, 6):
        batch, same = world.decode(rows[:count]), other.decode(others[:count])
        got = graphs.run(batch, *world.inputs(batch))
        torch.testing.assert_close(got, other.eager(same), atol=2e-5, rtol=1e-5)
    assert len(graphs.recorded) == 4


@pytest.mark.parametrize("tree", [False, True])
def test_drafts_are_verified_in_graphs(make: Callable[..., World], tree: bool) -> None:
    world, other = make(topk=1 + tree), make(topk=1 + tree)
    graphs = runner(world, modes={VERIFY: 4})
    if tree:
        graphs.capture(trees={VERIFY: 4})
    lengths = [3, 9, 14]
    rows, others = world.rows(lengths), other.rows(lengths)
    parents = [[[-1, 0, 0, 1]] * 3, [[-1, 0, 1, 1], [-1, 0, 1, 2], [-1, 0, 0, 0]]]
    for shape in parents:
        found = []
        for here, its_rows in ((world, rows), (other, others)):
            for row in its_rows:
                here.table.extend(row, 4)
            drafts = DraftTree.from_parents(shape, here.device) if tree else None
            lens = [here.table.length(row) for row in its_rows]
            found.append(ForwardBatch(VERIFY, its_rows, lens, [4] * 3, drafts))
        got = graphs.run(found[0], *world.inputs(found[0])).clone()
        assert torch.equal(got, other.unrecorded(graphs.padded(found[1]))[:12])
        if shape is parents[-1]:
            break
        for here, its_rows in ((world, rows), (other, others)):
            for row in its_rows:
                here.table.truncate(row, here.table.length(row) - 2)
    assert (VERIFY, 4) in graphs.recorded
    # The eager plan has shorter tables, and sums in another order.
    torch.testing.assert_close(got, other.eager(found[1]), atol=2e-5, rtol=1e-5)


def test_what_is_not_recorded_runs_eagerly_and_says_so(
    make: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    world = make()
    graphs = runner(world, buckets=[1, 2])
    rows = world.rows([3, 4, 5])
    batch = world.decode(rows)
    with caplog.at_level(logging.INFO, "polyattn.serving"):
        got = graphs.run(batch, *world.inputs(batch))
        graphs.run(batch, *world.inputs(batch))
    assert torch.equal(got, world.eager(batch))
    assert graphs.eager_steps == {"the largest recorded batch has 2 sequences": 2}
    assert [r.message for r in caplog.records if r.name == "polyattn.serving"] == [
        "a step of 3 sequences runs eagerly: the largest recorded batch has 2 sequences"
    ]
    extend = ForwardBatch(EXTEND, rows[:1], [4], [4])
    assert graphs.eager_because(extend) == "steps of mode EXTEND are not recorded"
    chunks = runner(world, modes={EXTEND: 4})
    assert chunks.eager_because(extend) == ""
    assert chunks.eager_because(ForwardBatch(EXTEND, rows[:1], [4], [3])) == (
        "recorded EXTEND steps have 4 tokens in each row"
    )
    encoder = ForwardBatch(DECODE, rows[:1], [4], [1], cross=True)
    assert graphs.eager_because(encoder) == "steps over the keys of an encoder are not recorded"


def test_without_device_graphs_every_step_is_eager() -> None:
    with torch.no_grad():
        world = World("cpu", "torch_sdpa")
        graphs = runner(world, graph=None)
        graphs.capture()
        batch = world.decode(world.rows([3]))
        got = graphs.run(batch, *world.inputs(batch))
    assert torch.equal(got, world.eager(batch))
    assert graphs.eager_steps == {"torch has no device graphs on cpu": 1}
    assert graphs.recorded == ()


def test_results_by_sequence_lose_their_padding_too() -> None:
    with torch.no_grad():
        world = World("cpu", "torch_sdpa", topk=1)
        graphs = runner(world, modes={VERIFY: 2})
        graphs._forward = lambda ids, positions: {"last": world.model(ids, positions)[1::2], "name": "x"}
        rows = world.rows([3, 4, 5])
        for row in rows:
            world.table.extend(row, 2)
        batch = ForwardBatch(VERIFY, rows, [world.table.length(row) for row in rows], [2] * 3)
        found = graphs.run(batch, *world.inputs(batch))
        assert found["last"].shape == (3, V)
        assert found["name"] == "x"
        graphs = runner(world)
        graphs._forward = lambda ids, positions: world.model(ids, positions)[:1].sum()
        batch = world.decode(rows)
        with pytest.raises(GraphError, match=r"forward returned a tensor of shape \(\) for 4 tokens of 4 sequences"):
            graphs.run(batch, *world.inputs(batch))


@pytest.mark.parametrize(
    "topk, dtype", [(0, "auto"), (1, "auto"), (2, "auto"), (0, "fp8_e4m3"), (0, "fp4_e2m1"), (1, "fp4_e2m1")]
)
def test_the_serving_steps_hold_to_the_contract(topk: int, dtype: str) -> None:
    """plan on the host; prepare and the model neither wait, nor keep memory, nor read what moved."""
    with torch.no_grad():
        world = World("cpu", "torch_sdpa", topk=topk, dtype=dtype)
        backend = world.backend
        rows = world.rows([3, 9, 14])
        ids, positions = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
        tokens = 4 if topk else 1
        backend.init_cuda_graph_state(4, 16)
        count = 4 * tokens

        def plan() -> None:
            if topk:
                for row in rows:
                    world.table.extend(row, 4)
                lens = [world.table.length(row) for row in rows]
                drafts = DraftTree.from_parents([[-1, 0, 0, 1]] * 3) if topk > 1 else None
                batch = ForwardBatch(VERIFY, rows, lens, [4] * 3, drafts, padding=1)
            else:
                batch = ForwardBatch(DECODE, *_decoded(world, rows), padding=1)
            backend.init_forward_metadata_replay_cuda_graph(batch)
            new_ids, new_positions = world.inputs(batch)
            ids[:count].copy_(new_ids)
            positions[:count].copy_(new_positions)

        validate_static(backend.prepare, lambda: world.model(ids[:count], positions[:count]), plans=[plan] * 4)


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_latent_steps_hold_to_the_contract(dtype: Any) -> None:
    widths = (512, 64) if dtype == "fp8_e4m3" else (16, 8)
    layer = AttentionLayer(0, H, 1, sum(widths), v_head_dim=widths[0], scale=0.2, latent=True)
    with torch.no_grad():
        pool = KVPool([layer], KVCacheConfig(dtype, page_size=4), 30, dtype=torch.float32, device="cpu")
        table = RequestTable(4, LONGEST, 4, [-1], [PageAllocator(30)], "cpu")
        backend = AttentionBackend([layer], pool, table, limits=Limits(4, 4, LONGEST), backend="torch_sdpa")
        backend.init_cuda_graph_state(4, 4)
        rows = [table.add() for _ in range(3)]
        query, new = torch.randn(4, H, sum(widths)), torch.randn(4, sum(widths))

        def plan() -> None:
            for row in rows:
                table.extend(row, 1)
            lens = [table.length(row) for row in rows]
            backend.init_forward_metadata_replay_cuda_graph(ForwardBatch(DECODE, rows, lens, [1] * 3, padding=1))

        validate_static(backend.prepare, lambda: backend.forward(query, new, None, layer), plans=[plan] * 6)


def _decoded(world: World, rows: list[int]) -> tuple[list[int], list[int], list[int]]:
    batch = world.decode(rows)
    return list(batch.rows), list(batch.seq_lens), list(batch.query_lens)


def test_buckets() -> None:
    assert batch_buckets(1) == (1,)
    assert batch_buckets(3) == (1, 2, 3)
    assert batch_buckets(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert batch_buckets(10) == (1, 2, 4, 8, 10)
    assert batch_buckets(600)[-4:] == (512, 544, 576, 600)
    with pytest.raises(InvalidInputError, match="limit=0: a batch of no sequence"):
        batch_buckets(0)


def test_refusals() -> None:
    with torch.no_grad():
        world = World("cpu", "torch_sdpa")
        rows = world.rows([3, 4])
    for modes, said in (
        ({ForwardMode.MIXED: 1}, "modes has MIXED: 1"),
        ({ForwardMode.IDLE: 1}, "modes has IDLE: 1"),
        ({DECODE: 2}, "modes has DECODE: 2"),
        ({VERIFY: 0}, "modes has TARGET_VERIFY: 0"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            runner(world, modes=modes)
    for buckets in ([], [0, 1], [9]):
        with pytest.raises(InvalidInputError, match="batch sizes from 1 to max_sequences=8 are needed"):
            runner(world, buckets=buckets)
    batch = world.decode(rows)
    ids, positions = world.inputs(batch)
    graphs = runner(world)
    with pytest.raises(InvalidInputError, match=r"input_ids has shape \(1,\); one for each of the 2 tokens"):
        graphs.run(batch, ids[:1], positions)
    with pytest.raises(InvalidInputError, match=r"positions has shape \(1, 2\)"):
        graphs.run(batch, ids, positions[None])


def test_a_kernel_that_reads_lengths_on_the_host_is_not_recorded() -> None:
    with torch.no_grad():
        world = World("cpu", "torch_native")
        batch = world.decode(world.rows([3, 4]))
        said = r"the step cannot be recorded: capture: .*(tolist|_local_scalar_dense).*\. Choose another backend"
        with pytest.raises(GraphError, match=said):
            runner(world).run(batch, *world.inputs(batch))


def test_a_device_without_graphs_keeps_its_backends() -> None:
    """As docs/serving.md says: what cannot be recorded stays, until `FakeGraph` refuses it."""
    world = World("cpu", None)
    before = world.backend.explain()["decode"].backend
    world.backend.init_cuda_graph_state(8, 32)
    assert world.backend.explain()["decode"].backend == before


@pytest.mark.usefixtures("gpu")
def test_a_device_graph_is_the_default_on_cuda() -> None:
    with torch.no_grad():
        world = World("cuda", "torch_sdpa")
        graphs = GraphRunner(world.backend, world.model, max_sequences=2, device="cuda")
        graphs.capture()
    assert all(isinstance(r.graph, CudaGraph) for r in graphs._recordings.values())


def test_padding_holds_nothing_of_the_step_before(make: Callable[..., World]) -> None:
    world = make()
    graphs = runner(world)
    rows = world.rows([3, 4, 5, 6])
    for count, padding in ((4, 0), (3, 1)):
        batch = world.decode(rows[:count])
        ids, positions = world.inputs(batch)
        graphs.run(batch, ids % (V - 1) + 1, positions)
        assert graphs._inputs[0][:4].tolist() == [*(ids % (V - 1) + 1).tolist(), *[0] * padding]
        assert graphs._inputs[1][:4].tolist() == [*positions.tolist(), *[0] * padding]


class Played:
    """A graph that ran once and is replayed without anything, so that what is left is the host's."""

    def capture(self, function: Callable[[], Any]) -> Any:
        return function()

    def replay(self) -> None:
        return None


class Operators(TorchDispatchMode):
    """Names of those that ran, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [] if func.is_view else [func.overloadpacket.__name__]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("planned", [False, True])
def test_the_host_does_few_operators_for_a_replayed_decode_step(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids and the positions if they are given: each is a launch, and a step has little time for them. The keys are
    one more in every row since the graph said so; ids that lie where it reads them are not copied."""
    monkeypatch.setattr("polyattn.serving.attention.backend.capturing", lambda kind: True)
    world = World("cpu", "torch_native", windows=(-1,))
    rows = [world.table.add(), world.table.add()]
    for row in rows:
        world.table.extend(row, 20)
    runner = GraphRunner(
        world.backend, world.model, max_sequences=2, device="cpu", buckets=[2], graph=Played, planned_positions=planned
    )
    ids = torch.zeros(2, dtype=torch.int64)
    given = (ids,) if planned else (ids, ids)
    batch = ForwardBatch(DECODE, rows, [4, 9], [1, 1])
    with torch.no_grad():
        first = runner.run(batch, *given)
        for _ in range(3):
            batch = batch.next()
            with Operators() as ran:
                assert runner.run(batch, *given) is first, "a view of the graph's memory, made once"
            assert ran.names == ["copy_"] * len(given)
        runner.input_ids[:2].fill_(3)
        with Operators() as ran:
            runner.run(batch.next(), runner.input_ids[:2], *given[1:])
        assert ran.names == ["copy_"] * len(given[1:])


@pytest.mark.parametrize("graph", [None, FakeGraph])
def test_positions_of_the_plan_are_those_that_are_given(graph: Any) -> None:
    given, planned = World("cpu", "torch_sdpa"), World("cpu", "torch_sdpa")
    runners = [
        GraphRunner(w.backend, w.model, max_sequences=2, device="cpu", graph=graph, planned_positions=w is planned)
        for w in (given, planned)
    ]
    ids = torch.arange(10, dtype=torch.int64)
    for world in (given, planned):
        for row in (world.table.add(), world.table.add()):
            world.table.extend(row, 20)
    with torch.no_grad():
        for batch in (
            ForwardBatch(EXTEND, [0, 1], [4, 6], [4, 6]),
            ForwardBatch(DECODE, [0, 1], [5, 7], [1, 1]),
            ForwardBatch(DECODE, [1], [8], [1]),
            ForwardBatch(ForwardMode.MIXED, [0, 1], [8, 9], [3, 1]),
        ):
            new, positions = ids[: batch.tokens] + 3, torch.tensor(batch.positions())
            wanted = runners[0].run(batch, new, positions)
            if graph is not None and batch.tokens <= 2:
                # Where recordings read them, before one is made too.
                new = runners[1].input_ids[: batch.tokens].copy_(new)
            assert torch.equal(wanted, runners[1].run(batch, new))
        with pytest.raises(InvalidInputError, match="run\\(\\) is given no positions: give one for each token, or"):
            runners[0].run(batch, new)
        with pytest.raises(InvalidInputError, match="planned_positions=True\\): leave them out"):
            runners[1].run(batch, new, positions)
    with pytest.raises(InvalidInputError, match="positions are those of a planned step, and none is planned"):
        _ = World("cpu", "torch_sdpa").backend.positions
