"""Layers that attend by a method are one graph: nothing is compiled again for a step, a branch or a layer."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import polyattn
from polyattn.errors import BackendUnavailableError, InvalidInputError, UnsupportedRequestError
from polyattn.nn import LocalAttention
from polyattn.video import Place, Run, place

from .test_video_methods import OPTIONS, small  # noqa: F401 - the options of each, and their fixture

HEADS, WIDTH, GRID, STEPS, LAYERS = 4, 64, (4, 4, 8), 2, 3
TRAINED = ("sliding_tile_attn", "video_sparse_attn", "sla_attn", "vmoba_attn")
each = pytest.mark.parametrize("name", OPTIONS)


class Block(torch.nn.Module):
    number: Tensor

    def __init__(self, number: int, name: str | None) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor(number))
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.to_gate, self.proj_l = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH // HEADS, WIDTH // HEADS)
        self.attend = LocalAttention(backend=name, role="self")
        self.cross = LocalAttention(backend=name, role="cross")
        self.gated = name == "video_sparse_attn"
        self.learned = name in ("sla_attn", "sage_sla_attn")

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        query, key, value = (one.unflatten(-1, (HEADS, -1)) for one in self.qkv(x).chunk(3, -1))
        gate = self.to_gate(x).unflatten(-1, (HEADS, -1)) if self.gated else None
        learned = {"proj_l.weight": self.proj_l.weight, "proj_l.bias": self.proj_l.bias} if self.learned else None
        out = self.attend(query, key, value, place=place(layer=self.number, gate=gate, tensors=learned))
        told = text.unflatten(-1, (HEADS, -1))
        out = out + self.cross(query, told, told, place=place(layer=self.number, role="cross"))
        return x + self.out(out.flatten(-2))


class Model(torch.nn.Module):
    def __init__(self, name: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block(number, name) for number in range(LAYERS))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, text)
        return x


def given() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 128, WIDTH, generator=generator), torch.randn(2, 7, WIDTH, generator=generator)


def passes(run: Run) -> Iterator[tuple[int, str]]:
    """Go through the steps and branches of a run."""
    for step in range(STEPS):
        for branch in ("cond", "uncond"):
            with run.at(grid=GRID, step=step, timestep=900.0 - 7 * step, branch=branch):
                yield step, branch


def denoised(model: Any, *, watched: bool = False) -> tuple[list[Tensor], Any]:
    """What a model gives at each step and branch, and who served whom. watched: nothing may be compiled after the
    first pass."""
    found, (x, text) = [], given()
    with Run(steps=STEPS, layers=LAYERS) as run, torch.no_grad():
        for at in passes(run):
            with torch._dynamo.config.patch(error_on_recompile=watched and at != (0, "cond")):
                found.append(model(x + at[0] / 10, text))
    return found, run.explain()


@pytest.mark.slow(keep=1)
@each
@pytest.mark.parametrize("how", ["model", "block"])
def test_one_graph_for_all_steps_branches_and_layers(name: str, how: str) -> None:
    """The model as a whole, and its blocks compiled once for all: layers are other numbers in the same graph."""
    model = Model(name)
    right, told = denoised(model)
    if how == "model":
        found, again = denoised(torch.compile(model, backend="aot_eager", fullgraph=True), watched=True)
    else:
        counter = CompileCounter()
        for block in model.blocks:
            block.compile(backend=counter, fullgraph=True)
        found, again = denoised(model, watched=True)
        assert counter.frame_count == 1
    torch.testing.assert_close(found, right)
    assert not torch.allclose(found[0], found[-1])
    assert {row.layer for row in again.rows} == set(range(LAYERS))
    assert again == told


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["video_sparse_attn", "sparse_video_gen_2_attn"])
def test_by_inductor(name: str) -> None:
    model = Model(name)
    right, _ = denoised(model)
    found, _ = denoised(torch.compile(model, fullgraph=True), watched=True)
    torch.testing.assert_close(found, right)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_those_of_the_place_of_the_forward(name: str, tmp_path: Path) -> None:
    """Backwards come when the run is elsewhere: each is that of its own step."""
    if name == "sliding_tile_attn":  # other windows in each step
        keys = itertools.product(range(STEPS), range(LAYERS), range(HEADS))
        path = tmp_path / "windows.json"
        path.write_text(json.dumps({f"{t}_{layer}_{h}": [1, 1, 1 + t] for t, layer, h in keys}))
        tiles = {**OPTIONS[name], "mask_strategy_file_path": str(path)}
        polyattn.configure(attention_backend_config={name: tiles})
    model, (x, text) = Model(name), given()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    grads = []
    for run_of in (model, compiled):
        inputs, outs = [], []
        with Run(steps=STEPS, layers=LAYERS) as run:
            for at in passes(run):
                inputs.append(x.clone().requires_grad_())
                with torch._dynamo.config.patch(error_on_recompile=at != (0, "cond")):
                    outs.append(run_of(inputs[-1], text).square().sum())
        some = [p for n, p in model.named_parameters() if "cross" not in n]
        found = [
            torch.autograd.grad(out, (own, *some), allow_unused=True) for out, own in zip(outs, inputs, strict=True)
        ]
        grads.append(found)
    torch.testing.assert_close(grads[1], grads[0])
    learned = [n for n, p in zip(model.state_dict(), grads[0][0], strict=False) if p is not None]
    assert len(learned) > LAYERS
    if name == "sliding_tile_attn":
        assert not torch.allclose(grads[0][0][0], grads[0][-1][0])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["sage_sla_attn", "sparse_video_gen_2_attn"])
def test_what_does_not_train_is_refused_in_the_forward(name: str) -> None:
    x, text = given()
    compiled = torch.compile(Model(name), backend="aot_eager", fullgraph=True)
    with (
        Run(steps=STEPS, layers=LAYERS) as run,
        run.at(grid=GRID, step=1),
        pytest.raises(UnsupportedRequestError, match="grad"),
    ):
        compiled(x.requires_grad_(), text)


def test_a_second_derivative_is_refused() -> None:
    model, (x, text) = torch.compile(Model("video_sparse_attn"), backend="eager", fullgraph=True), given()
    x.requires_grad_()
    with Run(steps=STEPS, layers=LAYERS) as run, run.at(grid=GRID, step=1):
        (grad,) = torch.autograd.grad(model(x, text).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedRequestError, match="second"):
        grad.sum().backward()


def test_a_gradient_that_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyattn.dispatch.bound_table import Recent
    from polyattn.methods import compiled

    monkeypatch.setattr(compiled, "_points", Recent(2))
    model, (x, text) = torch.compile(Model("video_sparse_attn"), backend="aot_eager", fullgraph=True), given()
    x.requires_grad_()
    with Run(steps=STEPS, layers=LAYERS) as run, run.at(grid=GRID, step=1):
        out = model(x, text).sum()
    with pytest.raises(InvalidInputError, match="compute gradients sooner"):
        out.backward()


def test_a_wrong_place_is_refused_as_by_eager_code() -> None:
    x, text = given()
    compiled = torch.compile(Model("video_sparse_attn"), backend="aot_eager", fullgraph=True)
    with torch.no_grad(), Run(steps=STEPS, layers=LAYERS) as run:
        with run.at(grid=(4, 4, 4), step=0), pytest.raises(InvalidInputError, match="128 tokens and its place 64"):
            compiled(x, text)
        with run.at(grid=GRID, step=0):
            compiled(x, text)
        with run.at(step=0), pytest.raises(InvalidInputError, match="works on a grid"):
            compiled(x, text)


def test_under_autocast() -> None:
    model, (x, text) = Model("video_sparse_attn"), given()
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Run(layers=LAYERS) as run, run.at(grid=GRID):
            torch.testing.assert_close(compiled(x, text), model(x, text))


def test_a_search_of_windows_notes_what_eager_code_notes(tmp_path: Path) -> None:
    """A search reads results and writes files; a graph holds none of it."""
    written = []
    for kind in ("eager", "compiled"):
        folder = tmp_path / kind
        folder.mkdir()
        tiles = {"sta_tile": [2, 2, 4], "sta_mode": "STA_searching", "sta_search_path": str(folder)}
        tiles["sta_candidates"] = [1, 1, 1, 1, 1, 2]
        polyattn.configure(attention_backend_config={"sliding_tile_attn": tiles})
        model: Any = Model("sliding_tile_attn")
        if kind == "compiled":
            model = torch.compile(model, backend="aot_eager", fullgraph=True)
        denoised(model, watched=True)
        written.append([json.loads(path.read_text()) for path in sorted(folder.iterdir())])
    assert len(written[0]) == 2  # one for each branch
    assert written[1] == written[0]


def test_a_place_said_in_the_graph_itself() -> None:
    """All of it as numbers: steps that change are symbols, not graphs."""
    layer = LocalAttention(backend="sliding_tile_attn")

    def run(qkv: list[Tensor], step: int, number: Tensor) -> Tensor:
        at = Place(grid=GRID, layer=number, layers=3, step=step, steps=2, timestep=step * 10, branch="x", role="self")
        out: Tensor = layer(*qkv, place=at)
        return out * 2

    qkv = [torch.randn(1, 128, HEADS, 16) for _ in range(3)]
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for step in (1, 0):
        for number in map(torch.tensor, range(3)):
            torch.testing.assert_close(compiled(qkv, step, number), run(qkv, step, number))


def test_a_place_of_a_graph_serves_calls_outside_of_it() -> None:
    """Dynamo ends a graph where it must; the place that was made before is still that of the run."""
    layer = LocalAttention(backend="video_sparse_attn")
    attend = torch.compiler.disable(lambda qkv, at: layer(*qkv, place=at))
    gate = torch.ones(1, 1, 1, 1)

    def block(qkv: list[Tensor]) -> Tensor:
        at = place(layer=1, gate=gate)
        return attend([t * 2 for t in qkv], at) + 1

    qkv = [torch.randn(1, 128, HEADS, 16) for _ in range(3)]
    with Run(layers=2) as run, run.at(grid=GRID):
        torch.testing.assert_close(torch.compile(block, backend="eager")(qkv), block(qkv))
        # What returns an LSE is no call of a method: it is refused as outside, after the graph has ended.
        with_lse = LocalAttention(backend="video_sparse_attn", return_lse=True)
        refused = torch.compile(lambda: with_lse(*qkv, place=place(layer=1, gate=gate)), backend="eager")
        with pytest.raises(UnsupportedRequestError, match="lse"):
            refused()


def test_exact_attention_with_a_place_of_a_run_is_traced() -> None:
    model, (x, text) = Model(None), given()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), Run(layers=LAYERS) as run, run.at(grid=GRID):
        torch.testing.assert_close(compiled(x, text), model(x, text))
    assert not run.explain().rows


@pytest.mark.slow
def test_a_saved_graph_needs_its_configuration(tmp_path: Path) -> None:
    """A program that is loaded where nobody names a method must not compute something else in silence."""
    polyattn.configure(
        attention_backend="video_sparse_attn",
        attention_backend_config={"video_sparse_attn": {"sparsity": 0.5, "coarse": "off"}},
    )
    layer = LocalAttention()

    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = layer(q, k, v, place=Place(grid=GRID, layer=1))
            return out

    qkv = tuple(torch.randn(1, 128, HEADS, 16) for _ in range(3))
    right = Attend()(*qkv)
    program = torch.export.export(Attend(), qkv)
    torch.testing.assert_close(program.module()(*qkv), right)
    torch.export.save(program, path := tmp_path / "attend.pt2")
    load = f"import torch, polyattn; program = torch.export.load({str(path)!r}).module()"
    code = f"{load}; q = torch.ones(1, 128, 4, 16); program(q, q, q)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert BackendUnavailableError.__name__ in done.stderr
    assert "configuration of this process names none" in done.stderr


def test_what_is_no_tensor_is_named() -> None:
    layer = LocalAttention(backend="video_sparse_attn")
    qkv = [torch.randn(1, 128, HEADS, 16) for _ in range(3)]

    def block(bias: Any) -> Any:
        return layer(*qkv, place=Place(grid=GRID, tensors={"gate_compress": torch.ones(1, 1, 1, 1), "bias": bias}))

    compiled = torch.compile(block, backend="eager")
    torch.testing.assert_close(compiled(None), block(None))
    with pytest.raises(InvalidInputError, match=r"tensors\['bias'\] must be a tensor, or None"):
        compiled("none")
