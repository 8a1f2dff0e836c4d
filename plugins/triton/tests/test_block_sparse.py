"""Block-sparse kernels against dense attention under the mask that a map stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from polyattn.contract import AttentionRequest
from polyattn.errors import InvalidInputError
from polyattn.semantics import reference
from polyattn.semantics.autograd import differentiable
from polyattn.semantics.block_maps import visible_keys
from polyattn.semantics.merge_lse import merge
from polyattn.testing import Installed, generate, run_case
from polyattn.testing.conforming import FULL
from polyattn_triton.block_sparse import BlockSparse
from polyattn_triton.hopper import block_sparse as hopper
from polyattn_triton.hopper.groups import grouped
from polyattn_triton.kernels import block_sparse as kernels
from polyattn_triton.kernels.block_sparse import Lists, Tiles

from .launched_offline import Problem as Call
from .launched_offline import elsewhere

NOWHERE = 2**31 - 1
FP32, BF16 = torch.float32, torch.bfloat16
BOUNDS = {FP32: 1e-5, BF16: 8e-3}


class Problem(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    lists: Lists
    scale: float

    @property
    def map(self) -> dict[str, Any]:
        counts, indices, valid = self.lists[:3]
        lists = {"block_counts": counts, "block_indices": indices, "block_valid": valid}
        return {**lists, "block_starts": self.lists.starts}

    def right(self) -> tuple[Tensor, ...]:
        """out, lse, dquery, dkey, dvalue, from the definition in float64."""
        wide = [t.double().requires_grad_() for t in (self.query, self.key, self.value)]
        s_q, s_k = self.query.shape[2], self.key.shape[2]
        mask = visible_keys(
            (self.lists.block_q, self.lists.block_k),
            s_q,
            s_k,
            **self.map,
            group=self.query.shape[1] // self.key.shape[1],
        )
        mask = mask.expand(*self.query.shape[:2], s_q, s_k)
        out, lse = reference.attention(
            *wide, attn_mask=mask, scale=self.scale, layout="BHSD", return_lse=True, compute_dtype=torch.float64
        )
        grads = torch.autograd.grad(out, wide, self.dout.double())
        return out.detach(), lse.detach(), *grads


def made(
    s_q: int, s_k: int, blocks: tuple[int, int] = (64, 64), *, heads: tuple[int, int] = (2, 1), D: int = 64,
    dtype: torch.dtype = FP32, sizes: bool = False, scale: float = 0.125, one_map: bool = False,
    starts: bool = False,
) -> Problem:  # fmt: skip
    draw = torch.Generator().manual_seed(s_q * s_k)
    shapes = ((heads[0], s_q), (heads[1], s_k), (heads[1], s_k), (heads[0], s_q))
    query, key, value, dout = (torch.randn(1, h, s, D, generator=draw).to(dtype) for h, s in shapes)
    rows, columns = -(-s_q // blocks[0]), -(-s_k // blocks[1])
    shape = (1, 1 if one_map else heads[0], rows)
    # The first list is empty, the last one full.
    counts = (torch.rand(shape, generator=draw) * (columns + 1)).int()
    counts.view(-1)[0], counts.view(-1)[-1] = 0, columns
    indices = torch.rand(*shape, columns, generator=draw).argsort(-1).int()
    indices[torch.arange(columns) >= counts[..., None]] = NOWHERE
    valid = (torch.rand(columns, generator=draw) * (blocks[1] + 1)).int() if sizes else None
    if valid is not None:
        valid[0] = 0
    where = None
    if starts:
        # Blocks of many sizes, one behind the other with gaps, in an order of each key head.
        valid = (torch.rand(heads[1], columns, generator=draw) * (blocks[1] + 1)).int()[None]
        where = (valid + 3).cumsum(-1).int() - valid
        valid = torch.minimum(valid, (s_k - where).clamp(min=0))
        order = torch.rand(1, heads[1], columns, generator=draw).argsort(-1)
        valid, where = valid.gather(-1, order), where.clamp(max=s_k).gather(-1, order)
    return Problem(query, key, value, dout, Lists(counts, indices, valid, *blocks, where), scale)


def error(found: Tensor, right: Tensor) -> float:
    return float((found.detach().double() - right).norm() / right.norm().clamp(min=1e-9))


def check(problem: Problem, *, tma: bool = False, tiles: Tiles | None = None) -> None:
    p, right = problem, problem.right()
    out = torch.full_like(p.query, float("nan"))
    lse = torch.full(p.query.shape[:3], float("nan"))
    kernels.forward(p.query, p.key, p.value, p.lists, scale=p.scale, out=out, lse=lse, tiles=tiles, tma=tma)
    grads = kernels.backward(
        p.dout, p.query, p.key, p.value, out, lse, p.lists, scale=p.scale, tiles=(tiles, tiles), tma=tma
    )
    bound = BOUNDS[p.query.dtype]
    assert torch.equal(lse.isinf(), right[1].isinf())
    alive = right[1].isfinite()
    assert bool(alive.any())
    assert bool((out[~alive] == 0).all())
    assert bool((grads[0][~alive] == 0).all())
    assert error(lse[alive], right[1][alive]) < 1e-5
    assert error(out, right[0]) < bound
    assert all(error(grad, wanted) < bound for grad, wanted in zip(grads, right[2:], strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_map_of_each_head_with_empty_rows(dtype: torch.dtype) -> None:
    check(made(128, 192, dtype=dtype))


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
def test_ends_inside_a_block_and_valid_sizes(tma: bool) -> None:
    check(made(100, 150, sizes=True, one_map=True), tma=tma)
    check(made(100, 150, (64, 128)), tma=tma)


@pytest.mark.parametrize("sizes", [False, True], ids=["whole blocks", "valid sizes"])
def test_blocks_in_smaller_tiles(sizes: bool) -> None:
    """Lengths are whole tiles, not whole blocks: the last tiles of the last blocks are past the end. What is there in
    memory is not a number."""
    made_here = made(192, 192, (128, 128), sizes=sizes)
    wide = [torch.full((1, t.shape[1], 256, 64), torch.nan)[:, :, :192].copy_(t) for t in made_here[:4]]
    check(Problem(*wide, *made_here[4:]), tiles=Tiles(64, 32, 4, 1))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_blocks_of_each_head_that_start_anywhere(heads: tuple[int, int], tma: bool) -> None:
    check(made(100, 250, heads=heads, starts=True), tma=tma)
    check(made(100, 250, (64, 128), heads=heads, starts=True), tiles=Tiles(32, 32, 4, 1))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale: float) -> None:
    check(made(64, 100, scale=scale))


def test_one_query_and_wide_heads() -> None:
    check(made(1, 130, (128, 64), D=256, dtype=BF16))


def test_the_transposed_lists_are_those_of_the_mask() -> None:
    lists = made(300, 200, heads=(3, 1)).lists
    turned = kernels.transposed(lists, 4)
    seen = visible_keys((1, 1), 5, 4, lists.counts, lists.indices)
    assert torch.equal(turned.counts.long(), seen.sum(2))
    for head, block in ((h, b) for h in range(3) for b in range(4)):
        count = int(turned.counts[0, head, block])
        assert turned.indices[0, head, block, :count].tolist() == seen[0, head, :, block].nonzero()[:, 0].tolist()


def bound(problem: Problem, **changes: Any) -> Any:
    lists = problem.lists
    request = AttentionRequest(
        family="block_sparse", head_dim=problem.query.shape[-1], heads=problem.query.shape[1],
        kv_heads=problem.key.shape[1], layout="BHSD", scale=problem.scale, block_map=True,
        block_sizes=lists.valid is not None, block_shape=(lists.block_q, lists.block_k), s_relation="fewer",
        **{"dtype": "float32", **changes},
    )  # fmt: skip
    return BlockSparse().bind(request.normalised())


def test_parts_of_a_list_are_merged_and_trained() -> None:
    """A key block after the other: the LSEs make them one, and gradients go through the merge."""
    p = made(64, 128, heads=(1, 1))
    both = p.lists._replace(counts=torch.full((1, 1, 1), 2).int(), indices=torch.tensor([[[[1, 0]]]]).int())
    right = p._replace(lists=both).right()
    call = differentiable(bound(p, lse=True, grad=("query", "key", "value", "lse")), True)
    inputs = [t.clone().requires_grad_() for t in p[:3]]
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    parts = [call(*inputs, block_counts=one, block_indices=one[..., None] * number) for number in (0, 1)]
    out, lse = merge([part[0] for part in parts], [part[1] for part in parts], layout="BHSD")
    found = (out, lse, *torch.autograd.grad(out, inputs, p.dout))
    assert all(error(a, b) < 1e-5 for a, b in zip(found, right, strict=True))


def test_strided_inputs_and_outputs() -> None:
    p = made(64, 100)
    wide = torch.full((1, 64, 2, 80), float("nan")).transpose(1, 2)[..., :64]
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in p[:3]]
    spread = {name: t if t is None else t.repeat_interleave(2, -1)[..., ::2] for name, t in p.map.items()}
    forward = bound(p).forward
    assert forward(*turned, **spread, out=wide) is wide
    assert torch.equal(wide, forward(*p[:3], **p.map))


@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch_invariant"])
def test_strides_choose_the_kernel_only_where_bits_may_differ(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper: TMA does not reach a batch that is expanded, or that begins off a boundary; it reaches a copy."""
    taken: list[str] = []

    def kernel(name: str) -> Callable[..., None]:
        def run(query: Tensor, *rest: Any, out: Tensor, **more: Any) -> None:
            taken.append(name)
            out.copy_(query)

        return run

    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "forward", kernel("hopper"))
    monkeypatch.setattr(kernels, "forward", kernel("portable"))
    p = made(64, 128, dtype=BF16)
    call = bound(p, dtype="bfloat16", platform="cuda", batch_invariant=invariant).forward
    expanded = p.key.expand(2, *p.key.shape[1:])
    odd = torch.empty(p.query.numel() + 1, dtype=BF16)[1:].view(p.query.shape).copy_(p.query)
    out = torch.empty(1, 2, 64, 65, dtype=BF16)[..., :64]
    assert call(*p[:3], **p.map).equal(p.query)
    assert call(odd, p.key, p.value, **p.map).equal(p.query)
    assert call(p.query.expand(2, -1, -1, -1), expanded, expanded, **p.map).shape == (2, 2, 64, 64)
    assert call(*p[:3], **p.map, out=out) is out
    assert out.equal(p.query)
    assert taken == ["hopper"] + 3 * ["hopper" if invariant else "portable"]


def test_a_map_that_points_outside_is_refused() -> None:
    p = made(64, 100)
    with pytest.raises(InvalidInputError, match=r"block_indices lists block 2147483647; there are 2 of 64 keys"):
        bound(p).forward(*p[:3], **{**p.map, "block_counts": torch.full_like(p.lists.counts, 2)})


@pytest.mark.slow
def test_the_kit_finds_nothing_in_bfloat16() -> None:
    """The smallest of its cases: interpreted, they take seconds each. Conformance runs those in float32."""
    target = Installed("triton", "cpu")
    cases = generate(target.rows, target.facts, families=["block_sparse"], dtypes=["bfloat16"], per_row=12)
    small = sorted(cases, key=lambda case: sum(s_q * s_k for s_q, s_k in case.lengths) * case.request.heads)
    assert len(small) >= 12
    for case in small[:4]:
        assert run_case(target, case).verdict == "passed", str(run_case(target, case))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Compiling takes seconds each: most under --polyattn-full."""
    if "launch" in metafunc.fixturenames:
        launches = [("cuda:90", Call("sparse", (64, 64), queries=100, off=1))]
        if metafunc.config.getoption(FULL, False):
            launches += [("cuda:90", Call("sparse", (width, width), queries=300)) for width in (64, 128, 256)]
            launches += [(target, Call("sparse", (64, 64), queries=300)) for target in ("cuda:80", "hip:gfx942")]
        metafunc.parametrize("launch", launches, ids=lambda launch: f"{launch[0]}-{launch[1]}")


def test_compilers_of_devices_take_the_kernels(launch: tuple[str, Call]) -> None:
    """Offline, by Triton's own compiler; see `launched_offline`."""
    (launched,) = elsewhere(*launch)
    assert {kernel.name for kernel in launched} >= {"_forward", "_backward_query", "_backward_key"}
    assert not [kernel for kernel in launched if kernel.wrong]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("one_map", [False, True])
def test_more_samples_than_a_grid_has_are_several_launches(one_map: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's grids end at 65,535 along their last axis: a launch of more is an invalid argument."""
    one = made(70, 100, sizes=True, one_map=one_map)
    five = [torch.cat([t * (1 + n / 8) for n in range(5)]) for t in one[:4]]
    lists = one.lists
    if not one_map:
        lists = lists._replace(counts=lists.counts.expand(5, -1, -1), indices=lists.indices.expand(5, -1, -1, -1))
        lists = lists._replace(counts=lists.counts.contiguous(), indices=lists.indices.contiguous())
    found = []
    for most in (2, 65_535):
        monkeypatch.setattr("polyattn.adapters.samples.MOST", most)
        out, lse = torch.full_like(five[0], float("nan")), torch.full(five[0].shape[:3], float("nan"))
        kernels.forward(*five[:3], lists, scale=one.scale, out=out, lse=lse)
        found.append((out, lse, *kernels.backward(five[3], *five[:3], out, lse, lists, scale=one.scale)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("ascending", [False, True])
def test_packed_blocks_as_groups_of_sixteen_keys(ascending: bool) -> None:
    """Each listed key is in one group; fours of groups lie together, whole ones are before those with fewer keys.

    Blocks that follow each other are one run: their ends do not fill groups up.
    """
    draw = torch.Generator().manual_seed(3)
    most = 0
    for blocks in (1, 40, 300):
        sizes = torch.randint(0, 65, (1, 1, blocks), generator=draw).int()
        gaps = 3 * (torch.rand(blocks, generator=draw) < 0.3).int()
        starts = ((sizes + gaps).cumsum(-1) - sizes - gaps).int()
        count = int(torch.randint(1, blocks + 1, (1,), generator=draw))
        listed = torch.randperm(blocks, generator=draw)[:count]
        listed = (listed.sort().values if ascending else listed).int()
        lists = Lists(torch.tensor([[[count]]]).int(), listed.view(1, 1, 1, -1), sizes, 64, 64, starts)
        found = grouped(lists, 1, 1, int((starts + sizes).max()))
        total, whole, fours = found.counts[0, 0, 0].tolist()
        groups = [(entry >> 5, entry & 31) for entry in found.indices[0, 0, 0, :total].tolist()]
        keys = sorted(key for start, held in groups for key in range(start, start + held))
        spans = [range(starts[0, 0, n], starts[0, 0, n] + sizes[0, 0, n]) for n in listed.tolist()]
        assert keys == sorted(key for span in spans for key in span)
        assert all((held == 16) == (place < whole) for place, (_, held) in enumerate(groups))
        assert fours % 4 == 0
        assert all(groups[n][0] == groups[n - n % 4][0] + 16 * (n % 4) for n in range(fours))
        most = max(most, sum(-(-len(span) // 16) for span in spans) - total)
    assert (most > 20) == ascending
