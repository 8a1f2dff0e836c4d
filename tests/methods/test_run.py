"""`polyattn.video.Run`: the places of its calls, what is kept in it, and what it says of who served them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import polyattn
from polyattn.errors import ConfigError, InvalidInputError
from polyattn.nn import LocalAttention
from polyattn.video import Place, Run, place

NAME = "window_video_attn"
OPTIONS = {NAME: {"window_tile": [2, 2, 2], "window_reach": [0, 1, 0], "first_full_step": 1}}
GRID = (4, 4, 8)
GATE = "gate_compress"


@pytest.fixture(autouse=True)
def small() -> None:
    torch._dynamo.reset()
    polyattn.configure(attention_backend_config=OPTIONS)


def tensors(keys: int = 128) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 4, 16, generator=generator) for n in (128, keys, keys)]


# Places --------------------------------------------------------------------------------------------------------------


def test_a_layer_is_where_its_run_is() -> None:
    with Run(steps=50, layers=3) as run, run.at(grid=GRID, text=(1, 2), valid_text=(0, 2), step=4, timestep=0.5):
        here = place(layer=2, tensors={"proj_l": 1})
    assert (here.grid, here.text, here.valid_text, here.step, here.steps) == (GRID, (1, 2), (0, 2), 4, 50)
    assert (here.layer, here.layers, here.timestep, here.branch, here.role) == (2, 3, 0.5, "", None)
    assert (here.tensors, here.run) == ({"proj_l": 1}, run)


def test_what_is_given_wins_over_the_run() -> None:
    gate = torch.ones(1)
    with Run() as run, run.at(grid=GRID, step=4, branch="cond"):
        here = place(layer=0, grid=(1, 2, 3), branch="other", role="cross", gate=gate)
        assert (here.grid, here.step, here.branch, here.role) == ((1, 2, 3), 4, "other", "cross")
        assert here.tensors[GATE] is gate
        assert here.kept is run.kept(0, "other")
        mine: dict[str, Any] = {}
        assert place(layer=0, kept=mine).kept is mine
        assert place().kept is None  # there is no layer that it would be of


def test_an_explicit_place_of_a_call_wins() -> None:
    q, k, v = tensors()
    right = polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID, step=1))
    with Run() as run, run.at(grid=(8, 4, 4), step=0):
        torch.testing.assert_close(polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID, step=1)), right)
    assert run.explain().rows == ()  # it was told of no call: the place is not its own


def test_the_inner_of_two_points_holds() -> None:
    with Run() as outer, outer.at(grid=GRID, step=1):
        with Run() as run:
            with run.at(grid=GRID, step=2):
                assert (place().step, place().run) == (2, run)
            assert (place().step, place().run) == (1, outer)
        point = outer.at(grid=GRID, step=3)
        for _ in range(2):
            with point, point:
                assert place().step == 3
        assert place().step == 1
    assert (place().step, place().run, place().grid) == (None, None, None)


def test_outside_of_a_run_exact_attention_is_itself_and_a_method_says_what_it_misses() -> None:
    q, k, v = tensors()
    assert torch.equal(polyattn.attention(q, k, v, place=place(layer=3)), polyattn.attention(q, k, v))
    polyattn.configure()
    with pytest.raises(InvalidInputError, match="works on a grid, and the place has none"):
        polyattn.attention(q, k, v, backend=NAME, place=place(layer=3))


def test_two_tasks_of_one_thread_do_not_see_each_other() -> None:
    seen: dict[str, list[Any]] = {"a": [], "b": []}

    async def denoise(name: str) -> None:
        with Run(steps=3) as run:
            for step in range(3):
                with run.at(grid=GRID, step=step, branch=name):
                    await asyncio.sleep(0)
                    here = place(layer=0)
                    assert here.kept is not None
                    here.kept["steps"] = here.kept.get("steps", 0) + 1
                    seen[name].append((here.branch, here.step, here.run is run, here.kept["steps"]))

    async def both() -> None:
        await asyncio.gather(denoise("a"), denoise("b"))

    asyncio.run(both())
    assert seen == {name: [(name, step, True, step + 1) for step in range(3)] for name in "ab"}
    assert place().run is None


def test_a_thread_has_a_run_of_its_own() -> None:
    found = []
    with Run() as run, run.at(grid=GRID):
        thread = threading.Thread(target=lambda: found.append(place().run))
        thread.start()
        thread.join()
        assert place().run is run
    assert found == [None]


def test_the_number_of_a_tensor_is_read_once() -> None:
    number = torch.tensor(2)
    with Run(layers=4) as run, run.at(grid=GRID):
        assert place(layer=number).layer == 2
        assert place(layer=number).kept is place(layer=2).kept
        number.fill_(3)
        assert place(layer=number).layer == 3
        with torch.inference_mode():
            assert place(layer=torch.tensor(1)).layer == 1
        with pytest.raises(InvalidInputError, match="layer=4 must be a whole number from 0, below layers=4"):
            place(layer=torch.tensor(4))


WRONG: list[tuple[Any, str]] = [
    (lambda: Run(steps=0), "steps=0 must be a whole number of 1 or more"),
    (lambda: Run(layers=1.5), r"layers=1.5 must be"),  # type: ignore[arg-type]
    (lambda: Run(steps=2).at(step=2), "step=2 must be a whole number from 0, below steps=2"),
    (lambda: Run().at(grid=(1, 2)), r"grid=\(1, 2\) must be"),  # type: ignore[arg-type]
    (lambda: place(grdi=GRID), r"place\(\) has no field 'grdi'; there are branch, grid, heads, kept,"),
    (lambda: place(run=1), r"place\(\) has no field 'run'"),
    (lambda: place(gate=1, tensors={GATE: 1}), r"given gate and tensors\['gate_compress'\], which are the same"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_values(wrong: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        wrong()


# What is kept --------------------------------------------------------------------------------------------------------


def test_state_is_that_of_a_layer_and_branch_and_ends_with_the_run() -> None:
    with Run() as run:
        for step in range(2):
            for branch in ("cond", "uncond"):
                with run.at(grid=GRID, step=step, branch=branch):
                    for layer in range(2):
                        kept = place(layer=layer).kept
                        assert kept is not None
                        kept.setdefault("was", []).append((step, branch, layer))
        assert run.kept(1, "cond") == {"was": [(0, "cond", 1), (1, "cond", 1)]}
        last, point = run.kept(1, "uncond"), run.at(grid=GRID)
    assert last == {}
    for use in (run.at, run.__enter__, point.__enter__, lambda: run.kept(0)):
        with pytest.raises(InvalidInputError, match="the run has ended, and what its methods kept is gone: make a"):
            use()
    run.end()


def test_a_place_that_is_asked_for_after_the_end() -> None:
    run = Run()
    with run.at(grid=GRID):
        run.end()
        with pytest.raises(InvalidInputError, match="the run has ended"):
            place(layer=1)


# What it says --------------------------------------------------------------------------------------------------------


def denoise(run: Run, layers: list[Any], steps: int = 3) -> None:
    qkv = tensors()
    for step in range(steps):
        for branch in ("cond", "uncond"):
            with run.at(grid=GRID, step=step, branch=branch):
                for number, layer in enumerate(layers):
                    layer(*qkv, place=place(layer=number))


def test_it_says_who_served_what() -> None:
    layers = [LocalAttention(backend=NAME) for _ in range(3)]
    crossing = LocalAttention(backend=NAME, role="cross")
    with Run(steps=3, layers=3) as run:
        denoise(run, layers)
        with run.at(grid=GRID, step=2):
            crossing(*tensors(keys=40), place=place(layer=1))
    said = run.explain()
    cross = "sparse video methods never serve cross-attention: it is computed densely"
    dense = "the first 1 steps run dense (first_full_step)"
    # Tiles of 2 x 2 x 2 on a grid of 2 x 2 x 4 tiles, with a reach along the height: 2 tiles of 16.
    expected = [
        (0, dense, 2, 1.0, ("dense: torch_sdpa@cpu",)),
        (0, "", 4, 0.125, ("block_sparse: torch_sdpa@cpu",)),
    ]
    for layer in range(3):
        found = [(r.layer, r.why, r.calls, r.density, r.kernels) for r in said.rows if r.layer == layer]
        wanted = [(layer, *row[1:]) for row in expected]
        assert found == [*wanted, *([(1, cross, 1, 1.0, ("dense: torch_sdpa@cpu",))] if layer == 1 else [])]
    assert {row.method for row in said.rows} == {NAME}
    assert str(said).splitlines() == [
        f"layers 0-2: 6 calls, left dense by a rule of {NAME}: {dense}; dense: torch_sdpa@cpu",
        f"layers 0-2: 12 calls, {NAME}, density 0.125; block_sparse: torch_sdpa@cpu",
        f"layer 1: 1 call, left dense by a rule of {NAME}: {cross}; dense: torch_sdpa@cpu",
    ]
    assert len(json.loads(json.dumps(said.to_dict()))["rows"]) == 7


def test_two_runs_are_told_of_their_own_calls() -> None:
    layers = [LocalAttention(backend=NAME)]
    runs = [Run(), Run()]
    for run, steps in zip(runs, (2, 4), strict=True):
        denoise(run, layers, steps)
    assert [sum(row.calls for row in run.explain().rows) for run in runs] == [4, 8]


@pytest.mark.parametrize(
    ("method", "options", "density"),
    [
        (NAME, {"window_tile": [2, 2, 2], "window_reach": [0, 1, 1]}, 0.3125),
        (NAME, {"window_tile": [2, 2, 2], "window_reach": [0, 1, 1] * 2 + [9, 9, 9] * 2}, (0.3125 + 1) / 2),
        (NAME, {"window_tile": [2, 2, 2], "window_reach": [9, 9, 9]}, 1.0),
        ("video_sparse_attn", {"sparsity": 0.5, "coarse": "one"}, 0.5),
    ],
)
def test_densities(method: str, options: dict[str, Any], density: float) -> None:
    polyattn.configure(attention_backend_config={method: options})
    with Run() as run:
        denoise(run, [LocalAttention(backend=method)], steps=1)
    (row,) = run.explain().rows
    assert row.density == pytest.approx(density)


@pytest.mark.parametrize("name", ["sliding_tile_attn", NAME])
def test_the_density_of_some_heads_is_theirs(name: str, tmp_path: Path) -> None:
    """Other ranks have the others."""
    path = tmp_path / "strategy.json"
    found = [1, 1, 3, 1]  # of four heads, tiles along time that each sees
    path.write_text(json.dumps({f"0_0_{head}": [size, 1, 1] for head, size in enumerate(found)}))
    windows = {"mask_strategy_file_path": str(path), "skip_time_steps": 0, "sta_tile": [1, 4, 8]}
    reaches = {"window_tile": [1, 4, 8], "window_reach": [n for size in found for n in (size // 2 * 9, 0, 0)]}
    polyattn.configure(attention_backend_config={"sliding_tile_attn": windows, NAME: reaches})
    q = torch.randn(1, 96, 1, 16)
    with Run(layers=1) as run, run.at(grid=(3, 4, 8), step=0):
        for head in range(4):
            polyattn.attention(q, q, q, backend=name, place=place(layer=0, heads=(head, 4)))
        assert run.explain().rows[0].density == pytest.approx((1 + 3 * (1 / 3)) / 4)
        polyattn.attention(q, q, q, backend=name, place=place(layer=0, heads=(2, 4)))
    assert run.explain().rows[0].density == pytest.approx((2 + 3 * (1 / 3)) / 5)


@pytest.mark.parametrize("name", ["vmoba_attn", "sla_attn", "sparse_video_gen_2_attn"])
def test_what_is_chosen_call_by_call_has_a_density(name: str) -> None:
    """The share of the pairs that have any weight, counted one by one. Without a layer there is nowhere to keep it."""
    S, D = 128, 16
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, S, 4, D, generator=generator) for _ in range(2))
    value = torch.eye(S)[None, :, None].expand(2, S, 4, S).contiguous()
    learned = {"proj_l.weight": torch.zeros(S, S)}
    chosen = {"moba_select_mode": "threshold", "moba_threshold": 0.4, "temporal_chunk_size": 3, "first_full_step": 0}
    sizes = {"spatial_chunk_size": [2, 2], "st_chunk_size": [1, 2, 4], "temporal_layer": 1, "spatial_layer": 0}
    topk = {"temporal_topk": 1, "spatial_topk": 1, "st_topk": 1, "st_layer": 0}
    dense = {"svg2_first_layers_fp": 0.0, "svg2_first_times_fp": 0.0, "svg2_top_p_kmeans": 0.5}
    options = {
        "vmoba_attn": {**chosen, **sizes, **topk},
        "sla_attn": {"topk_ratio": 0.6, "BLKQ": 64},
        "sparse_video_gen_2_attn": {**dense, "svg2_num_q_centroids": 4, "svg2_num_k_centroids": 9},
    }
    polyattn.configure(attention_backend_config=options)
    shares = []
    with Run(layers=3) as run, torch.no_grad():
        for step in (0, 1):
            with run.at(grid=(4, 4, 8), step=step):
                weights = polyattn.attention(q + step, k, value, backend=name, place=place(layer=1, tensors=learned))
            shares.append(float((weights > 0).double().mean()))
        with run.at(grid=(4, 4, 8), step=0):
            polyattn.attention(q, k, value, backend=name, place=place(tensors=learned))
    numbered, unnumbered = sorted(run.explain().rows, key=lambda row: row.layer is None)
    assert 0 < shares[0] < 1
    assert numbered.density == pytest.approx(sum(shares) / 2)
    assert unnumbered.density == (numbered.density if name == "sla_attn" else None)


def test_a_step_that_does_another_thing_is_told_apart() -> None:
    """At step 0 the call clusters for the steps after it, and attends densely itself."""
    name, calls = "sparse_video_gen_2_attn", 3
    early = {"svg2_zero_step_kmeans_init": True, "svg2_first_times_fp": 0.1, "svg2_first_layers_fp": 0.0}
    polyattn.configure(attention_backend_config={name: {**early, "svg2_num_q_centroids": 4, "svg2_num_k_centroids": 9}})
    with Run(steps=calls, layers=1) as run, torch.no_grad():
        for step in range(calls):
            with run.at(grid=GRID, step=step):
                polyattn.attention(*tensors(), backend=name, place=place(layer=0))
    told = [(row.calls, row.kernels) for row in run.explain().rows]
    assert told == [(1, ("dense: torch_sdpa@cpu",)), (2, ("block_sparse: torch_sdpa@cpu",))]


def test_a_run_that_no_method_served() -> None:
    """It says so, and what was asked for and served nothing is an error, as without a run."""
    with Run() as run:
        denoise(run, [LocalAttention()])
    assert str(run.explain()).startswith("no call of this run asked for a method: name one")
    with Run() as run:
        denoise(run, [LocalAttention(backend=NAME)], steps=1)
    with pytest.raises(ConfigError, match="was asked for and served no call"):
        polyattn.check_components()


def test_asking_who_serves_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a question have no contents; none may stay in what a method keeps."""
    from polyattn.methods.video.window import WindowVideo

    attend = WindowVideo.attend

    def keeping(self: Any, plan: Any, query: Any, *rest: Any, kept: dict[str, Any], **more: Any) -> Any:
        kept.setdefault("first", query)
        return attend(self, plan, query, *rest, kept=kept, **more)

    monkeypatch.setattr(WindowVideo, "attend", keeping)
    qkv = tensors()
    with Run() as run, run.at(grid=GRID, step=1):
        polyattn.explain(polyattn.attention, *qkv, backend=NAME, place=place(layer=0))
        assert run.kept(0) == {}
        polyattn.attention(*qkv, backend=NAME, place=place(layer=0))
        assert type(run.kept(0)["first"]) is Tensor
        assert len(run.explain().rows) == 1


# Compiled ------------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    number: Tensor

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.attention = LocalAttention(backend=NAME, role="self")
        self.register_buffer("number", torch.tensor(layer), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.attention(q * 1.5, k, v, place=place(layer=self.number))
        return out + 1


def test_steps_and_layers_share_their_graphs() -> None:
    """Layers that are compiled once differ by a tensor; nothing is compiled again for a step, a branch or a layer."""
    blocks, qkv = [Block(layer) for layer in range(3)], tensors()
    compiled = [torch.compile(block, backend="eager") for block in blocks]
    with Run(steps=4, layers=3) as run:
        for step in range(4):
            for branch in ("cond", "uncond"):
                with run.at(grid=GRID, step=step, branch=branch):
                    right = [block(*qkv) for block in blocks]
                    # What dynamo sees of the first layer it sees of all.
                    with torch._dynamo.config.patch(error_on_recompile=step > 0):
                        found = [block(*qkv) for block in compiled]
                torch.testing.assert_close(found, right)
    assert {(row.layer, row.calls) for row in run.explain().rows if not row.why} == {(n, 12) for n in range(3)}


def test_it_needs_no_torch() -> None:
    code = "import sys, polyattn.video as v; v.place(layer=1); v.Run(steps=2).at(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# Recomputation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_is_where_its_forward_was(reentrant: bool) -> None:
    """Of several steps, in a backward of another thread, after the run."""
    inputs = [t.requires_grad_() for t in tensors()]

    def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = polyattn.attention(query, key, value, backend=NAME, place=place(layer=torch.tensor(1)))
        return out

    def passes(run: Run, call: Any) -> Tensor:
        found = []
        for step in range(3):  # the first step is dense, by the rule
            with run.at(grid=GRID, step=step):
                found.append(call(*inputs).square().sum() * (step + 1))
        return torch.stack(found).sum()

    with Run(steps=3, layers=2) as run:
        right = torch.autograd.grad(passes(run, block), inputs)
    given: dict[str, Any] = {"use_reentrant": False, "context_fn": polyattn.checkpoint_context_fn}
    if reentrant:  # of torch's two ways the other one takes no contexts
        given = {"use_reentrant": True}
    with Run(steps=3, layers=2) as run:
        loss = passes(run, lambda *some: checkpoint(block, *some, **given))
    if reentrant:
        with pytest.raises(InvalidInputError, match=r"context_fn=polyattn\.checkpoint_context_fn"):
            loss.backward()
        return
    worker = threading.Thread(target=loss.backward)
    worker.start()
    worker.join()
    for tensor, grad in zip(inputs, right, strict=True):
        torch.testing.assert_close(tensor.grad, grad)
    assert sum(row.calls for row in run.explain().rows) == 3
    assert place(layer=1).grid is None  # nothing of it stays
