"""What holds for every method that core computes itself: compiling, modes of torch, and the words of `explain`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.contract import Row
from polyattn.errors import ConfigError, InvalidInputError
from polyattn.methods import bound
from polyattn.methods.video.records import EMULATED, PORTABLE, portable
from polyattn.nn import LocalAttention
from polyattn.registry.manager import get_manager
from polyattn.selection import overrides
from polyattn.video import Place

OPTIONS: dict[str, dict[str, Any]] = {
    "sliding_tile_attn": {"sta_tile": [2, 2, 4], "skip_time_steps": 0},
    "video_sparse_attn": {"sparsity": 0.5},
    "sla_attn": {"topk_ratio": 0.5, "BLKQ": 64},
    "sage_sla_attn": {"BLKQ": 64},
    "vmoba_attn": {
        "temporal_chunk_size": 1,
        "temporal_topk": 2,
        "spatial_chunk_size": [2, 2],
        "spatial_topk": 2,
        "st_chunk_size": [1, 2, 4],
        "st_topk": 2,
        "moba_select_mode": "topk",
        "first_full_step": 0,
        "first_full_layer": 1,
    },
    "sparse_video_gen_2_attn": {
        "svg2_num_q_centroids": 4,
        "svg2_num_k_centroids": 5,
        "svg2_first_layers_fp": 0.3,
        "svg2_first_times_fp": 0.0,
    },
}
LEARNED = {"proj_l.weight": torch.eye(16) / 4, "gate_compress": torch.linspace(-1, 1, 16).view(1, 1, 1, 16)}
each = pytest.mark.parametrize("name", OPTIONS)


@pytest.fixture(autouse=True)
def small(tmp_path: Path) -> None:
    torch._dynamo.reset()
    keys = itertools.product(range(2), range(3), range(4))
    windows = {f"{t}_{layer}_{h}": [1 + layer % 2, 1, 1 + h % 2] for t, layer, h in keys}
    path = tmp_path / "windows.json"
    path.write_text(json.dumps(windows))
    tiles = {**OPTIONS["sliding_tile_attn"], "mask_strategy_file_path": str(path)}
    polyattn.configure(attention_backend_config={**OPTIONS, "sliding_tile_attn": tiles})


def inputs(**kind: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 128, 4, 16, generator=generator).to(**kind) for _ in range(3)]


def at(layer: Any = 1, **more: Any) -> Place:
    return Place(grid=(4, 4, 8), layer=layer, layers=3, step=1, steps=2, tensors=LEARNED, **more)


def test_all_are_tried() -> None:
    assert OPTIONS.keys() == PORTABLE.keys()


@each
def test_only_sliding_tiles_plan_anew_for_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is orders of tokens on the device: to make one waits for all that is queued there."""
    made: list[Any] = []
    real = bound._Attend._planned
    monkeypatch.setattr(bound._Attend, "_planned", lambda self, *given: made.append(given) or real(self, *given))
    for step in (0, 1):
        for branch in ("", "uncond"):
            polyattn.attention(*inputs(), backend=name, place=dataclasses.replace(at(), step=step, branch=branch))
    assert len(made) == (4 if name == "sliding_tile_attn" else 1)


@pytest.mark.slow(keep=1)
@each
def test_compiled_layers_share_their_graphs(name: str) -> None:
    """Layers differ by a tensor alone, the number of the layer: a first one that runs dense, and others."""
    layer = LocalAttention(backend=name)

    def block(q: Tensor, k: Tensor, v: Tensor, number: Tensor) -> Tensor:
        out: Tensor = layer(q * 1.5, k, v, place=at(number))
        return out + 1

    qkv, numbers = inputs(), [torch.tensor(i) for i in range(3)]
    right = [block(*qkv, number) for number in numbers]
    compiled = torch.compile(block, backend="eager")
    for i, number in enumerate(numbers):
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            torch.testing.assert_close(compiled(*qkv, number), right[i])


@each
def test_under_autocast(name: str) -> None:
    """As with tensors of that dtype: nothing inside of the method is narrowed on its own."""
    with torch.autocast("cpu", torch.bfloat16):
        out = polyattn.attention(*inputs(), backend=name, place=at())
    assert torch.equal(out, polyattn.attention(*inputs(dtype=torch.bfloat16), backend=name, place=at()))


@each
def test_what_inference_mode_left_serves_later_calls(name: str) -> None:
    kept: dict[str, Any] = {}
    with torch.inference_mode():
        right = polyattn.attention(*inputs(), backend=name, place=at(kept=kept))
    again = polyattn.attention(*inputs(), backend=name, place=at(kept={}))
    torch.testing.assert_close(again, right)
    polyattn.attention(*inputs(), backend=name, place=at(kept=kept))
    if "grad" in PORTABLE[name].providers[0].rows[0].allows:
        q, k, v = (t.requires_grad_() for t in inputs())
        polyattn.attention(q, k, v, backend=name, place=at(kept=kept)).sum().backward()
        assert q.grad is not None


@each
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_layouts_and_strides(name: str, layout: str) -> None:
    qkv = inputs()
    right = polyattn.attention(*qkv, backend=name, place=at(2))
    wide = [torch.cat([t, t], -1)[..., :16] for t in qkv]
    if layout == "BHSD":
        wide, right = [t.transpose(1, 2) for t in wide], right.transpose(1, 2)
    torch.testing.assert_close(polyattn.attention(*wide, layout=layout, backend=name, place=at(2)), right)


def no_kernel(*_: Any) -> None:
    raise AssertionError("a kernel was asked for")


@each
def test_wrong_places_are_refused_before_any_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    monkeypatch.setattr(bound._Inner, "_call", no_kernel)
    for grid, text in (((4, 4, 9), (0, 0)), ((4, 4, 8), (0, 1)), ((4, 4, 7), (8, 7))):
        wrong = Place(grid=grid, text=text, layer=1, layers=3, step=1, steps=2, tensors=LEARNED)
        there = (
            rf"{name}: the call has 128 tokens and its place {wrong.tokens}: grid=\({grid[0]}, .* with text=\({text[0]}"
        )
        with pytest.raises(InvalidInputError, match=there):
            polyattn.attention(q, k, v, backend=name, place=wrong)
    if name in ("sla_attn", "sage_sla_attn"):  # they cut the sequence as it is
        return
    with pytest.raises(InvalidInputError, match=f"{name} works on a grid, and the place has none: give Place"):
        polyattn.attention(q, k, v, backend=name, place=Place(layer=1, layers=3, step=1, steps=2, tensors=LEARNED))


@each
def test_one_that_served_no_call_is_an_error(name: str) -> None:
    q, k, v = inputs()
    polyattn.attention(q, k, v, backend=name)
    polyattn.attention(q, k, v, backend=name, place=Place(role="cross"))
    with pytest.raises(ConfigError, match=f"{name} was asked for and served no call"):
        polyattn.check_components()
    polyattn.attention(q, k, v, backend=name, place=at())
    polyattn.check_components()


def without_capture(row: Row) -> Row:
    return dataclasses.replace(row, allows={name: c for name, c in row.allows.items() if name != "graph_capture"})


@each
def test_one_record_for_every_platform(name: str) -> None:
    """A vendor's plugin puts its own providers before core's, and changes no limit of core's."""
    found = {info.platform: info for info in get_manager().backends.values() if info.name == name}
    assert found.keys() == {"cpu", "cuda", "rocm", "xpu", "musa", "npu"}
    for platform, info in found.items():
        own = [provider for provider in info.providers if provider.name == "polyattn"]
        # What core only emulates is for a CPU: on a device it is a plugin's kernel.
        # Graphs of a device hold what has static shapes: tests of graphs say which. Nothing else differs.
        alike = [dataclasses.replace(one, rows=tuple(map(without_capture, one.rows))) for one in own]
        assert alike == ([] if name in EMULATED and platform != "cpu" else list(PORTABLE[name].providers))
        assert not own or info.providers[-1] == own[0]
        assert info.priority is None
    assert portable(name, "cpu") == found["cpu"]


@pytest.mark.slow(keep=15)
@pytest.mark.parametrize(("text", "valid"), [((0, 9), (0, 4)), ((5, 40), (3, 17)), ((6, 0), (6, 0)), ((6, 2), (0, 0))])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sliding_tile_attn", {"skip_time_steps": 2}),
        ("sparse_video_gen_2_attn", {"svg2_first_times_fp": 1.0}),
        ("window_video_attn", {"first_full_step": 2, "window_tile": [2, 2, 2], "window_reach": [0, 0, 0]}),
        ("window_video_attn", {"window_tile": [2, 2, 2], "window_reach": [2, 2, 2]}),
    ],
)
def test_what_is_left_dense_sees_no_padding(
    name: str, options: dict[str, Any], text: tuple[int, int], valid: tuple[int, int]
) -> None:
    """Hosts give the padding of text as a number in the place, and no mask beside it."""
    known = overrides.current_settings().attention_backend_config.get(name, {})
    polyattn.configure(attention_backend_config={name: {**known, **options}})
    place = Place(grid=(3, 4, 5), text=text, valid_text=valid, step=1, steps=2, layer=2, layers=3)
    tokens = 60 + sum(text)
    keys = torch.ones(tokens, dtype=torch.bool)
    keys[valid[0] : text[0]] = False
    keys[text[0] + 60 + valid[1] :] = False
    q, k, v = torch.randn(3, 2, tokens, 4, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = polyattn.attention(q, k, v, backend=name, place=place)
    wanted = polyattn.attention(q, k, v, attn_mask=keys.expand(1, 1, tokens, tokens), backend="reference")
    torch.testing.assert_close(found, wanted)
    said = polyattn.explain(polyattn.attention, q, k, v, backend=name, place=place)
    assert [call.request.family for call in said.inner] == ["dense"]
