"""torch.compile of models on polyattn: one graph, compiled once for all steps, branches and layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import polyattn

pytest.importorskip("diffusers")
pytest.importorskip("accelerate")
from polyattn.integrations import diffusers as host

from .tiny_pipelines import frames, tiny


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    host.uninstall()
    polyattn.configure()


def twice(pipe, name: str) -> torch.Tensor:
    frames(pipe, name)
    return frames(pipe, name)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("prepared", [False, True])
def test_blocks_are_compiled_once(prepared):
    pipe = tiny("wan")
    native = frames(pipe, "wan")
    if prepared:
        host.prepare(pipe, {"transformer.cross": "reference"})
    else:
        host.install()
        pipe.transformer.set_attention_backend("polyattn")
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(twice(pipe, "wan"), native, atol=1e-4 * native.abs().max().item(), rtol=0)
    if prepared:
        assert "compiled code does not say who serves it" in str(host.report(pipe))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["ltx", "cogvideox"])
@pytest.mark.parametrize("before", [False, True])
def test_a_whole_model_is_one_graph(name, before):
    pipe = tiny(name)
    native = frames(pipe, name)
    if before:
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="aot_eager")
        host.prepare(pipe)
    else:
        host.prepare(pipe)
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(twice(pipe, name), native, atol=1e-4 * native.abs().max().item(), rtol=0)


def test_rules_of_steps_and_layers_compile_one_graph_for_each_backend():
    pipe = tiny("wan")
    rules = {"transformer": {"steps": {"1": "reference"}, "layers": {"0": "reference"}}}
    host.prepare(pipe, None, rules)
    eager = frames(pipe, "wan")
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False):
        frames(pipe, "wan")
    torch.testing.assert_close(frames(pipe, "wan"), eager, atol=1e-4 * eager.abs().max().item(), rtol=0)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("method", ["video_sparse_attn", "vmoba_attn"])
def test_a_sparse_method_stays_in_the_graph_of_a_block(method):
    options = {
        "video_sparse_attn": {"sparsity": 0.5, "coarse": "off"},
        "vmoba_attn": {
            "temporal_chunk_size": 1, "temporal_topk": 1, "spatial_chunk_size": [3, 3], "spatial_topk": 2,
            "st_chunk_size": [1, 3, 3], "st_topk": 3, "moba_select_mode": "topk", "first_full_step": 1,
        },
    }  # fmt: skip
    pipe = tiny("wan")
    size = {"height": 96, "width": 96, "num_inference_steps": 3}
    native = frames(pipe, "wan", **size)
    host.prepare(pipe, {"transformer": method}, options[method])
    eager = frames(pipe, "wan", **size)
    assert (eager - native).abs().max() > 1e-3 * native.abs().max()
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    frames(pipe, "wan", **size)
    torch.testing.assert_close(frames(pipe, "wan", **size), eager, atol=1e-4 * eager.abs().max().item(), rtol=0)
    served = [row for row in host.report(pipe).rows if row.method == method and row.role == "self"]
    assert {layer for row in served for layer in row.layers} == {0, 1, 2}
