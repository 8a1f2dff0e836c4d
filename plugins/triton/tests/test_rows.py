"""Kernels that move tokens in blocks, score means and choose the best, against torch's operators that define them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import polyattn
from polyattn.contract import Like, Place
from polyattn.methods.video import rows
from polyattn.methods.video.rows import Blocks, best, pooled, scored
from polyattn.methods.video.sla import SLA
from polyattn.methods.video.svg2 import _nearest, _Side, cluster_map, clustered_attention, k_means
from polyattn.methods.video.tiles import Cut, cut
from polyattn.methods.video.vmoba import VMoBA, chunk_means, chunk_scores, select_chunks
from polyattn.methods.video.vsa import VideoSparse
from polyattn.semantics.block_maps import lists_of
from polyattn_triton.device_ops import BlockOps
from polyattn_triton.kernels import chunks as chunk_kernels
from polyattn_triton.kernels import rows as kernels

GRID, TEXT = (5, 6, 9), (3, 6)
TOKENS = 5 * 6 * 9 + 9


def made(grid: tuple[int, int, int] = GRID) -> Cut:
    place = Place(grid=grid, text=TEXT, valid_text=(2, 4))
    return cut(place, (4, 4, 4), 64, Like(2, 4, 2, TOKENS, 24, torch.float32, torch.device("cpu")), "test")


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs something with torch's operators, then with the kernels."""

    def run(function: Any) -> tuple[Any, Any]:
        found = []
        for ops in (None, BlockOps()):
            monkeypatch.setattr(rows, "block_ops", lambda device, ops=ops: ops)
            found.append(function())
        monkeypatch.undo()
        return found[0], found[1]

    return run


def assert_same(found: Any, wanted: Any, **bounds: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **bounds)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("side", ["queries", "keys"])
@pytest.mark.parametrize("grid", [GRID, (4, 8, 8)], ids=str)
def test_blocks_are_gathered_with_their_means_and_gradients(both: Any, side: str, grid: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    blocks: Blocks = getattr(made(grid), side)
    x = leaf(2, blocks.tokens, 3, 24)
    upstream: list[Tensor] = []

    def run() -> tuple[Tensor, ...]:
        found, means = blocks.gather(x.transpose(1, 2), means=True)
        assert means is not None
        if not upstream:
            upstream.extend(torch.randn_like(t) for t in (found, means))
        (grad,) = torch.autograd.grad((found, means), x, upstream)
        (of_means,) = torch.autograd.grad(blocks.gather(x.transpose(1, 2), means=True)[1], x, upstream[1])
        return found, means, blocks.gather(x.transpose(1, 2))[0], grad, of_means

    assert_same(*both(run))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("shape", [(2, 3, TOKENS, 24), (1, 1, 1, 1), (1, 3, TOKENS, 1)], ids=str)
def test_rows_go_back_with_a_gated_coarse_part(both: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    blocks = made().queries
    rows_in, gate = leaf(2, 3, len(blocks.sizes) * 64, 24), leaf(*shape)
    coarse, upstream = leaf(2, 3, len(blocks.sizes), 24), torch.randn(2, 3, TOKENS, 24)

    def run() -> tuple[Tensor, ...]:
        out = blocks.scatter(rows_in, gate=gate, coarse=coarse)
        return out, blocks.scatter(rows_in), *torch.autograd.grad(out, (rows_in, gate, coarse), upstream)

    found, wanted = both(run)
    # Rows that fill a block up are nobody's.
    assert_same(found, wanted, atol=1e-4, rtol=1e-4)
    assert bool((found[0][:, :, TEXT[0] : TEXT[0] + 270] != 0).any())
    assert bool((found[0][:, :, -TEXT[1] :] == 0).all())


@pytest.mark.parametrize("wanted", [True, False], ids=["with values", "scores"])
def test_means_are_scored(both: Any, wanted: bool) -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 4, 70, 24), torch.randn(2, 2, 45, 24), torch.randn(2, 2, 45, 20)
    found = both(lambda: [t for t in scored(q, k, v if wanted else None, 0.3, 2) if t is not None])
    assert len(found[0]) == 1 + wanted
    assert_same(*found)


@pytest.mark.parametrize(("count", "kept"), [(45, 7), (64, 64), (1, 1), (300, 299)])
def test_the_best_are_chosen(both: Any, count: int, kept: int) -> None:
    torch.manual_seed(3)
    scores = torch.randn(2, 3, count) * 10.0 ** torch.randint(-30, 30, (2, 3, count))
    assert_same(*([found] for found in both(lambda: best(scores, kept))))


def test_of_equal_scores_the_first_are_chosen_and_signs_are_read() -> None:
    inf = float("inf")
    scores = torch.tensor([[1.0, 3.0, 3.0, -inf, 3.0], [-2.0, -1.0, -3.0, -1.0, -1.0], [0.0, -0.0, inf, -1.0, 0.0]])
    chosen = BlockOps.top(scores, 2)
    assert chosen is not None
    assert chosen.tolist() == [[1, 2], [1, 3], [0, 2]]
    assert BlockOps.top(scores, 5).tolist() == [[0, 1, 2, 3, 4]] * 3  # type: ignore[union-attr]


def test_more_scores_than_a_program_holds_are_left_to_torch(both: Any) -> None:
    scores = torch.randn(1, kernels.MOST + 1)
    assert kernels.top(scores, 3) is None
    assert_same(*([found] for found in both(lambda: best(scores, 3))))


class Inner:
    """The calls of a method, served by whom selection finds."""

    scale = None

    def block_sparse(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return polyattn.block_sparse_attention(query, key, value, layout="BHSD", **given)

    def varlen(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return polyattn.varlen_attention(query, key, value, **given)

    def dense(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return polyattn.attention(query, key, value, layout="BHSD")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("coarse", ["gate", "off"])
def test_a_method_computes_the_same_with_kernels(both: Any, coarse: str) -> None:
    torch.manual_seed(4)
    inputs = [leaf(1, heads, TOKENS, 16) for heads in (4, 2, 2)]
    gate, upstream = leaf(1, TOKENS, 4, 16), torch.randn(1, 4, TOKENS, 16)
    place = Place(grid=GRID, text=TEXT, valid_text=(2, 4), tensors={"gate_compress": gate}, kept={})
    method = VideoSparse(sparsity=0.6, coarse=coarse)
    plan = method.plan(place, Like(1, 4, 2, TOKENS, 16, torch.float32, torch.device("cpu")))
    trained = (*inputs, gate) if coarse == "gate" else inputs
    inner: Any = Inner()

    def run() -> tuple[Tensor, ...]:
        out = method.attend(plan, *inputs, place=place, kept={}, inner=inner)
        with torch.no_grad():
            again = method.attend(plan, *inputs, place=place, kept={}, inner=inner)
        torch.testing.assert_close(again, out, atol=1e-5, rtol=1e-5)
        return out, *torch.autograd.grad(out, trained, upstream)

    assert_same(*both(run), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("block", [16, 64, 48])
def test_means_of_blocks_in_order(both: Any, block: int) -> None:
    torch.manual_seed(5)
    x = torch.randn(2, 100, 3, 24).transpose(1, 2)
    assert_same(*([found] for found in both(lambda: pooled(x, block))))
    assert (BlockOps.pooled(x, block) is None) == (block == 48)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("feature_map", ["softmax", "elu", "relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_sparse_linear_attention_is_the_same_with_kernels(both: Any, feature_map: str, bias: bool) -> None:
    torch.manual_seed(6)
    # More tokens than one program sums up, and no whole number of blocks.
    q, k, v = (torch.randn(1, 1100, heads, 24).transpose(1, 2) for heads in (4, 2, 2))
    learned = {"proj_l.weight": torch.randn(24, 24)} | ({"proj_l.bias": torch.randn(24)} if bias else {})
    place = Place(grid=(1, 10, 110), tensors=learned, kept={})
    method = SLA(topk_ratio=0.2, feature_map=feature_map, linear_scope="all", BLKQ=128, BLKK=64)
    plan = method.plan(place, Like(1, 4, 2, 1100, 24, torch.float32, torch.device("cpu")))
    inner: Any = Inner()

    def run() -> Tensor:
        return method.attend(plan, q, k, v, place=place, kept={}, inner=inner)

    found, wanted = both(run)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert found.stride() == wanted.stride()


def test_the_nearest_centroid_and_the_first_of_equals(both: Any) -> None:
    torch.manual_seed(7)
    points, centroids = torch.randn(2, 300, 3, 24).transpose(1, 2), torch.randn(2, 3, 70, 24)
    centroids[:, :, 69] = centroids[:, :, 3]
    found, wanted = both(lambda: _nearest(points, centroids))
    assert torch.equal(found, wanted)
    assert not bool((found == 69).any())


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("tokens", "clusters"), [(1000, 7), (256, 300), (3, 1)])
def test_tokens_in_the_order_of_their_clusters(both: Any, tokens: int, clusters: int) -> None:
    torch.manual_seed(8)
    # Some clusters are empty.
    labels = (torch.rand(2, 3, tokens) ** 2 * clusters).long()
    assert_same(*both(lambda: _Side.of(labels, clusters, 64)[1:]))


@pytest.mark.slow
def test_k_means_and_clustered_attention_are_the_same_with_kernels(both: Any) -> None:
    torch.manual_seed(9)
    q, k, v = (torch.randn(1, 700, heads, 24).transpose(1, 2) for heads in (4, 2, 2))

    def run() -> list[Tensor]:
        rows, keys = k_means(q, q[:, :, :9], 2), k_means(k, k[:, :, 5:40], 2)
        seen = cluster_map(rows, keys, 0.5, 0.1)
        inner: Any = Inner()
        out = clustered_attention(q, k, v, rows.labels, keys.labels, seen, inner)
        assert 0.05 < seen.float().mean() < 0.95
        return [rows.centroids, keys.centroids, out]

    assert_same(*both(run), atol=1e-5, rtol=1e-4)


def test_flags_as_lists() -> None:
    torch.manual_seed(10)
    flags = torch.rand(2, 3, 5, 1500) < 0.3
    flags[0, 0, 0], flags[0, 0, 1] = False, True
    (counts, indices), (right_counts, right) = BlockOps.listed(flags), lists_of(flags)
    assert torch.equal(counts, right_counts)
    there = torch.arange(1500) < counts[..., None]
    assert torch.equal(indices[there], right[there])


class NoContents(TorchDispatchMode):
    """Refuses reads of contents, and tensors of Python's numbers, which a captured graph cannot have."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "lift_fresh"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("scale", [0.3, -0.2])
@pytest.mark.parametrize("held", [128, 0])
def test_queries_meet_the_chunks_that_they_chose(held: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks whose keys stay while queries pass, and chunks whose keys pass; more queries than a program takes."""
    torch.manual_seed(12)
    monkeypatch.setattr(chunk_kernels, "_HELD", held)
    monkeypatch.setattr(chunk_kernels, "_TURNS", 2)
    monkeypatch.setattr(chunk_kernels, "_ROWS", 2)
    tokens, own = 150, (torch.arange(150) * 7 % 5).int()
    q, k, v = (torch.randn(2, tokens, heads, 24).transpose(1, 2) for heads in (4, 2, 2))
    order, sizes = own.argsort(stable=True).int(), own.bincount().int()
    lists = (order, (sizes.cumsum(0) - sizes).int(), sizes, own)
    means = torch.randn(2, 2, 5, 24)
    with NoContents():
        found = BlockOps.attend_chosen(q, k, v, means, lists, 30, 2, None, scale, None)
    assert found is not None
    out, counts = found
    seen = select_chunks(q @ means.repeat_interleave(2, 1).mT, own.long(), 2, None, "query_head")
    assert torch.equal(counts, seen.sum(2))
    logits = scale * q.double() @ k.double().repeat_interleave(2, 1).mT
    logits = logits.masked_fill(~seen[..., own], float("-inf"))
    wanted = logits.softmax(-1) @ v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(out.transpose(1, 2).double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("grid", "threshold"), [((4, 5, 6), None), ((4, 5, 6), 0.7), ((10, 5, 6), 0.25)], ids=str)
def test_queries_choose_chunks_and_merge_what_they_found(
    both: Any, threshold: float | None, grid: tuple[int, int, int]
) -> None:
    torch.manual_seed(11)
    tokens = grid[0] * 30
    q, k, v = (torch.randn(1, tokens, heads, 24).transpose(1, 2) for heads in (2, 1, 1))
    mode = "topk" if threshold is None else "threshold"
    method = VMoBA(
        temporal_chunk_size=1, temporal_topk=3, spatial_chunk_size=[5, 2], spatial_topk=2, st_chunk_size=[2, 5, 2],
        st_topk=4, moba_select_mode=mode, moba_threshold=threshold or 0.0, moba_threshold_type="query_head",
        first_full_step=0, first_full_layer=0, temporal_layer=1, spatial_layer=1, st_layer=1,
    )  # fmt: skip
    inner: Any = Inner()
    like = Like(1, 2, 1, tokens, 24, torch.float32, torch.device("cpu"))
    for layer in range(3):
        place = Place(grid=grid, layer=layer, kept={})
        plan = method.plan(place, like)
        cut = method.cut_of(place)
        chunks = plan[cut.option]
        found, wanted = both(lambda: method.attend(plan, q, k, v, place=place, kept={}, inner=inner))  # noqa: B023
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        pairs = BlockOps.choose(q, chunk_means(k, chunks), chunks.own, cut.kept, threshold)
        assert pairs is not None
        chosen, queries, firsts = (t.long() for t in pairs)
        seen = select_chunks(chunk_scores(q, k, chunks), chunks.own, cut.kept, threshold, "query_head")
        assert torch.equal(firsts.diff(dim=-1), seen.sum(-1))
        flags = torch.zeros(1, 2, tokens * (len(chunks.sizes) + 1), dtype=torch.int64)
        there = chosen < len(chunks.sizes)
        where = queries * (len(chunks.sizes) + 1) + chosen
        flags = flags.scatter_add(-1, where, there.long()).view(1, 2, tokens, -1)[..., :-1]
        assert torch.equal(flags.bool(), seen)
        assert int(flags.max()) == 1
