"""Methods in CUDA graphs: calls that ask for no contents and make no tensor of numbers can be captured, and are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import polyattn
from polyattn.dispatch.call_key import Static
from polyattn.dispatch.dense import dense_request
from polyattn.errors import InvalidInputError
from polyattn.methods import bound
from polyattn.methods.video.records import PORTABLE
from polyattn.methods.video.vsa import VideoSparse
from polyattn.video import Place

GRID = (8, 12, 16)
TOKENS = 8 * 12 * 16
OPTIONS: dict[str, dict[str, Any]] = {
    "sliding_tile_attn": {"skip_time_steps": 0, "sta_tile": [2, 4, 4]},
    "video_sparse_attn": {"sparsity": 0.8},
    "sla_attn": {"topk_ratio": 0.2},
    "vmoba_attn": {
        "temporal_chunk_size": 2, "temporal_topk": 2, "spatial_chunk_size": [4, 4], "spatial_topk": 3,
        "st_chunk_size": [2, 4, 4], "st_topk": 5, "moba_select_mode": "topk", "first_full_step": 0,
    },
    "sparse_video_gen_2_attn": {
        "svg2_num_q_centroids": 12, "svg2_num_k_centroids": 20, "svg2_kmeans_iter_init": 2, "svg2_first_layers_fp": 0.0,
        "svg2_first_times_fp": 0.0,
    },
    "window_video_attn": {"window_tile": [2, 4, 4]},
}  # fmt: skip


def options(name: str, folder: Path, heads: int) -> dict[str, Any]:
    given = OPTIONS[name]
    if name == "sliding_tile_attn":
        path = folder / "strategy.json"
        path.write_text(json.dumps({f"0_0_{head}": [1, 3, 1 + 2 * (head % 2)] for head in range(heads)}))
        given = {**given, "mask_strategy_file_path": str(path)}
    return given


def place() -> Place:
    learned = {"proj_l.weight": torch.eye(32), "gate_compress": torch.ones(1, 1, 1, 1)}
    return Place(grid=GRID, step=0, steps=1, layer=0, layers=1, tensors=learned)


class NothingAsked(TorchDispatchMode):
    """Refuses what a captured graph would do once, or cannot do: reads of contents, and tensors of Python's numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "repeat_interleave"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "vmoba_attn"])
def test_a_call_needs_no_contents(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V-MoBA counts pairs where no kernels choose: tests of these ask the same of it."""
    polyattn.configure(attention_backend_config={name: options(name, tmp_path, 2)})
    inputs = [torch.randn(1, TOKENS, 2, 32) for _ in range(3)]
    asked: list[Any] = []

    def serve(self: Any, call: Any, query: Tensor, key: Tensor, value: Tensor, given: Any) -> Tensor:
        asked.append(call)
        return query.new_zeros((*query.shape[:-1], value.shape[-1]))

    monkeypatch.setattr(bound._Inner, "_call", serve)
    polyattn.attention(*inputs, backend=name, place=place())  # makes the plan
    with NothingAsked():
        polyattn.attention(*inputs, backend=name, place=place())
    assert len(asked) == 2


CAPTURED = ("sliding_tile_attn", "video_sparse_attn", "sla_attn", "window_video_attn")


@pytest.mark.parametrize("platform", ["cuda", "rocm", "cpu"])
def test_rows_say_which_calls_can_be_captured(platform: str) -> None:
    from polyattn.registry.manager import get_manager

    for name in OPTIONS:
        (row,) = get_manager().backends[name, platform].providers[-1].rows
        assert ("graph_capture" in row.allows) == (platform != "cpu" and name in CAPTURED), name


def test_a_capture_needs_a_plan_that_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to a device cannot be captured. What an eager call planned is there for the captured one."""
    name = "video_sparse_attn"
    polyattn.configure(attention_backend_config={name: options(name, tmp_path, 2)})
    inputs = [torch.randn(1, TOKENS, 2, 32) for _ in range(3)]
    request = dense_request(Static(), *inputs, None, None, None)
    request = dataclasses.replace(request, place=True, options=(("coarse", "off"), ("sparsity", 0.8)))
    info = PORTABLE[name]
    eager = bound.bind(VideoSparse, info, request).forward
    captured = dataclasses.replace(request, graph_capture=True)
    monkeypatch.setattr(bound, "_capturing", lambda device: True)
    late = bound.bind(VideoSparse, info, captured).forward
    with pytest.raises(InvalidInputError, match="has no plan for: make the same call once before the capture"):
        late(*inputs, place=place())
    monkeypatch.setattr(bound, "_capturing", lambda device: False)
    right = eager(*inputs, place=place())
    monkeypatch.setattr(bound, "_capturing", lambda device: True)
    assert torch.equal(late(*inputs, place=place()), right)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_call_gives_what_an_eager_one_gives(name: str, tmp_path: Path, device: Callable[..., Any]) -> None:
    device("cuda", what="CUDA graphs of methods")
    polyattn.configure(attention_backend_config={name: options(name, tmp_path, 4)})
    torch.manual_seed(0)
    where = {"device": "cuda", "dtype": torch.bfloat16}
    sets = [[torch.randn(1, TOKENS, 4, 64, **where) for _ in range(3)] for _ in range(2)]
    learned = {"proj_l.weight": torch.eye(64, device="cuda"), "gate_compress": torch.ones(1, TOKENS, 4, 64, **where)}
    here = Place(grid=GRID, step=0, steps=1, layer=0, layers=1, tensors=learned)
    given = [t.clone() for t in sets[0]]

    def call(some: list[Tensor]) -> Tensor:
        out: Tensor = polyattn.attention(*some, backend=name, place=here)
        return out

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            call(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = call(given)
    for some in reversed(sets):
        for mine, other in zip(given, some, strict=True):
            mine.copy_(other)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(out, call(some))
