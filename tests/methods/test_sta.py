"""`sliding_tile_attn` against its mask: the mask against a loop, then outputs and gradients; and its files."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import ConfigError, InvalidInputError
from polyattn.methods.video.sta import sta_mask
from polyattn.methods.video.strategy import read_strategy
from polyattn.video import Place

NAME = "sliding_tile_attn"
HEADS, LAYERS, STEPS = 3, 2, 4
TILE = (2, 2, 4)
Window = tuple[int, int, int]

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A file of windows: `at(step, layer, head)` says which."""

    def written(
        at: Callable[[int, int, int], Sequence[int]], *, steps: int = STEPS, layers: int = LAYERS, heads: int = HEADS
    ) -> str:
        keys = itertools.product(range(steps), range(layers), range(heads))
        path = tmp_path / "strategy.json"
        path.write_text(json.dumps({f"{t}_{layer}_{h}": list(at(t, layer, h)) for t, layer, h in keys}))
        return str(path)

    return written


def configure(path: str, **options: Any) -> None:
    options = {"sta_tile": list(TILE), "skip_time_steps": 0, **options}
    polyattn.configure(attention_backend_config={NAME: {"mask_strategy_file_path": path, **options}})


def tensors(place: Place, *, heads: int = HEADS, kv_heads: int = HEADS, width: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = [(2, place.tokens, n, width) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def call(q: Tensor, k: Tensor, v: Tensor, place: Place, **more: Any) -> Tensor:
    out: Tensor = polyattn.attention(q, k, v, backend=NAME, place=place, **more)
    return out


def under_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **more: Any) -> Tensor:
    out: Tensor = polyattn.attention(q, k, v, attn_mask=mask, backend="reference", **more)
    return out


# Grids of 3 x 3 x 3 or 4 x 5 x 3 tiles, windows by head.
CASES: dict[str, tuple[Place, tuple[Window, Window, Window]]] = {
    "tiles divide the grid": (Place(grid=(6, 6, 12), step=0, layer=0), ((1, 1, 1), (3, 1, 3), (1, 3, 3))),
    "ragged on every axis": (Place(grid=(7, 9, 11), step=0, layer=0), ((3, 3, 1), (4, 1, 3), (1, 5, 1))),
    "text behind": (Place(grid=(6, 6, 12), text=(0, 9), step=0, layer=0), ((1, 1, 3), (3, 3, 3), (1, 1, 1))),
    "text on both sides, padded": (
        Place(grid=(6, 5, 12), text=(5, 40), valid_text=(3, 17), step=0, layer=0),
        ((1, 1, 3), (3, 3, 1), (1, 1, 1)),
    ),
}
cases = pytest.mark.parametrize("case", CASES)


def by_loop(place: Place, windows: Sequence[Window]) -> Tensor:
    """The mask in plain Python."""
    assert place.grid is not None
    grid, (front, back) = place.grid, place.text
    valid_front, valid_back = place.text if place.valid_text is None else place.valid_text
    cells = list(itertools.product(*map(range, grid)))
    count = [-(-n // t) for n, t in zip(grid, TILE, strict=True)]
    tiles: list[Any] = [None] * front
    tiles += [tuple(c // t for c, t in zip(cell, TILE, strict=True)) for cell in cells] + [None] * back

    def valid(token: int) -> bool:
        return token < valid_front or front <= token < front + len(cells) + valid_back

    def near(mine: Any, theirs: Any, window: Window) -> bool:
        for q, k, w, n in zip(mine, theirs, window, count, strict=True):
            centre = min(max(q, w // 2), n - 1 - w // 2)
            if abs(centre - k) > w // 2:
                return False
        return True

    mask = torch.zeros(1, len(windows), len(tiles), len(tiles), dtype=torch.bool)
    for h, window in enumerate(windows):
        known = {(a, b): near(a, b, window) for a in set(tiles) - {None} for b in set(tiles) - {None}}
        for q, k in itertools.product(range(len(tiles)), range(len(tiles))):
            text = tiles[q] is None or tiles[k] is None
            mask[0, h, q, k] = valid(k) and (text or known[tiles[q], tiles[k]])
    return mask


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("case", ["ragged on every axis", "text on both sides, padded"])
def test_the_mask_is_that_of_a_loop(case: str) -> None:
    place, windows = CASES[case]
    assert torch.equal(sta_mask(place, TILE, windows), by_loop(place, windows))


@pytest.mark.slow(keep=5)
@cases
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_it_is_attention_under_its_mask(case: str, layout: str, write: Write) -> None:
    place, windows = CASES[case]
    configure(write(lambda t, layer, h: windows[h]))
    q, k, v = (t.requires_grad_() for t in tensors(place, kv_heads=1))
    turned = (lambda t: t.transpose(1, 2)) if layout == "BHSD" else (lambda t: t)
    out = turned(call(turned(q), turned(k), turned(v), place, layout=layout, scale=0.3))
    right = under_mask(q, k, v, sta_mask(place, TILE, windows), scale=0.3)
    torch.testing.assert_close(out, right)
    dout = torch.randn(right.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, (q, k, v), dout)
    for got, want in zip(found, torch.autograd.grad(right, (q, k, v), dout), strict=True):
        torch.testing.assert_close(got, want)


def test_a_map_that_is_shifted_by_a_tile_is_seen(write: Write) -> None:
    place, windows = CASES["tiles divide the grid"]
    configure(write(lambda t, layer, h: windows[h]))
    q, k, v = tensors(place)
    out = call(q, k, v, place)
    wrong = under_mask(q, k, v, sta_mask(place, TILE, windows).roll(TILE[2], -1))
    swapped = under_mask(q, k, v, sta_mask(place, TILE, windows[::-1]))
    for other in (wrong, swapped):
        assert (out - other).norm() > 0.1 * out.norm()


@cases
def test_the_dense_limit(case: str, write: Write) -> None:
    """Windows as long as the grid, even ones too: attention to all but padding."""
    place, _ = CASES[case]
    assert place.grid is not None
    full = [-(-n // t) for n, t in zip(place.grid, TILE, strict=True)]
    configure(write(lambda t, layer, h: full))
    q, k, v = tensors(place)
    front, back = place.text
    keep = torch.ones(q.shape[1], dtype=torch.bool)
    if place.valid_text is not None:
        keep[place.valid_text[0] : front] = False
        keep[q.shape[1] - back + place.valid_text[1] :] = False
    torch.testing.assert_close(call(q, k, v, place), polyattn.attention(q, k[:, keep], v[:, keep]))


def test_windows_are_those_of_the_step_and_the_layer(write: Write) -> None:
    """Also where the layer's number is a tensor; its first steps run dense."""

    def window(step: int, layer: int, head: int) -> Window:
        return (1, 3 if layer else 1, 3 if (step + head) % 2 else 1)

    configure(write(window), skip_time_steps=1)
    grid = (6, 6, 12)
    q, k, v = tensors(Place(grid=grid))
    for step, layer in itertools.product(range(STEPS), range(LAYERS)):
        for number in (layer, torch.tensor(layer)):
            place = Place(grid=grid, step=step, steps=STEPS, layer=number, layers=LAYERS)
            windows = [window(step, layer, h) for h in range(HEADS)]
            right = under_mask(q, k, v, sta_mask(place, TILE, windows)) if step else polyattn.attention(q, k, v)
            torch.testing.assert_close(call(q, k, v, place), right)
    said = polyattn.explain(polyattn.attention, q, k, v, backend=NAME, place=Place(grid=grid, step=0, layer=0))
    assert (said.inner[0].rule, said.inner[0].request.family) == (NAME, "dense")
    assert said.inner[0].why == "the first 1 steps run dense (skip_time_steps)"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("tile", "block"), [((2, 8, 8), 128), ((1, 8, 8), 64), ((2, 2, 4), 16), ((6, 8, 8), 128)])
def test_tiles_are_cut_into_blocks_that_kernels_take(tile: Window, block: int, write: Write) -> None:
    place = Place(grid=(7, 10, 18), text=(0, 5), step=0, layer=0)
    counts = [-(-n // t) for n, t in zip((7, 10, 18), tile, strict=True)]
    windows = [(1, 1, 1), (counts[0], 1, 1), (1, counts[1], 1)]
    configure(write(lambda t, layer, h: windows[h]), sta_tile=list(tile))
    q, k, v = tensors(place)
    torch.testing.assert_close(call(q, k, v, place), under_mask(q, k, v, sta_mask(place, tile, windows)))
    said = polyattn.explain(polyattn.attention, q, k, v, backend=NAME, place=place)
    assert [one.request.family for one in said.inner] == ["block_sparse", "dense"]
    assert said.inner[0].request.block_shape == (block, block)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)])
def test_other_dtypes(dtype: torch.dtype, limit: float, write: Write) -> None:
    place, windows = CASES["text behind"]
    configure(write(lambda t, layer, h: windows[h]))
    q, k, v = (t.to(dtype) for t in tensors(place))
    out = call(q, k, v, place)
    right = under_mask(q.double(), k.double(), v.double(), sta_mask(place, TILE, windows))
    assert out.dtype == dtype
    assert (out.double() - right).norm() < limit * right.norm()


GRID = (6, 6, 12)
WRONG: list[tuple[dict[str, Any], Place, str]] = [
    ({}, Place(step=0, layer=0), "works on a grid, and the place has none"),
    ({}, Place(grid=GRID, layer=0), r"has other windows in each step, and the place has no step: run.at\(step=...\)"),
    ({}, Place(grid=GRID, step=0), r"has other windows in each layer, and the place has no layer"),
    ({}, Place(grid=GRID, step=4, layer=0), "is for 4 steps, and the run has step 4; give the mask strategy of this"),
    ({}, Place(grid=GRID, step=0, steps=50, layer=0), "is for 4 steps, and the run has 50 steps"),
    ({}, Place(grid=GRID, step=0, layer=2), "is for 2 layers, and this is layer 2"),
    ({}, Place(grid=GRID, step=0, layer=torch.tensor(2)), "is for 2 layers, and this is layer 2"),
    (
        {},
        Place(grid=GRID, step=0, layer=0, layers=60),
        "for 2 layers and 3 heads, and the model has 60 layers and 3 he",
    ),
    ({"heads": 2}, Place(grid=GRID, step=0, layer=0), "is for 2 layers and 2 heads, and the model has 3 heads"),
    (
        {"window": (3, 3, 5)},
        Place(grid=GRID, step=0, layer=0),
        r"window \[3, 3, 5\], and the grid has \[3, 3, 3\] tiles",
    ),
    (
        {"window": (3, 2, 1)},
        Place(grid=GRID, step=0, layer=0),
        r"window \[3, 2, 1\], even along height, which would cover 3 tiles of 3; a window is odd, or as long",
    ),
]


@pytest.mark.parametrize(("given", "place", "message"), WRONG)
def test_wrong_places_and_files_of_other_models(
    given: dict[str, Any], place: Place, message: str, write: Write
) -> None:
    window = given.get("window", (1, 1, 1))
    configure(write(lambda t, layer, h: window, heads=given.get("heads", HEADS)))
    q, k, v = tensors(Place(grid=GRID))
    with pytest.raises(InvalidInputError, match=f"{NAME}.*{message}"):
        call(q, k, v, place)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (Place(grid=GRID, step=0, layer=torch.tensor(-1)), "layer=.* from 0"),
        (Place(grid=GRID, step=0, layer=0, heads=(1, HEADS)), "heads=.* which end at 4"),
    ],
)
def test_places_that_would_take_the_windows_of_others(place: Place, message: str, write: Write) -> None:
    configure(write(lambda t, layer, h: (1, 1, 1)))
    with pytest.raises(InvalidInputError, match=message):
        call(*tensors(Place(grid=GRID)), place)


def test_explain_reads_a_layer_that_is_a_tensor(write: Write) -> None:
    """As another rank of a layer over several devices asks, outside of every run."""
    configure(write(lambda t, layer, h: (1, 1, 1)))
    place = Place(grid=GRID, step=0, layer=torch.tensor(1))
    said = polyattn.explain(polyattn.attention, *tensors(place), backend=NAME, place=place)
    assert [one.request.family for one in said.inner] == ["block_sparse"]


FILES: list[tuple[str, str]] = [
    ("", "cannot be read: Expecting value"),
    ("[]", r'holds a list; a mask strategy is a JSON object of "step_layer_head": \[wt, wh, ww\]'),
    ("{}", "holds nothing; a mask strategy is a JSON object"),
    ('{"0_0": [1, 1, 1]}', "the key '0_0' is not \"step_layer_head\", three numbers such as"),
    ('{"0_0_-1": [1, 1, 1]}', "the key '0_0_-1' is not"),
    ('{"0_0_0": [1, 1]}', r"'0_0_0' has the window \[1, 1\]; \[wt, wh, ww\] in tiles, each 1 or more"),
    ('{"0_0_0": [1, 1, true]}', r"has the window \[1, 1, True\]"),
    ('{"0_0_0": [1, 0, 1]}', r"has the window \[1, 0, 1\]"),
    ('{"0_0_0": null}', "has the window None"),
    (
        '{"0_0_0": [1, 1, 1], "1_0_1": [1, 1, 1], "1_0_0": [1, 1, 1]}',
        "its keys reach to 2 steps, 1 layers and 2 heads, and '0_0_1' is missing",
    ),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_files_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_strategy(str(path))
    configure(str(path))
    q, k, v = tensors(Place(grid=GRID))
    with pytest.raises(ConfigError, match=message):
        call(q, k, v, Place(grid=GRID, step=0, layer=0))


def test_files_are_read_again_where_they_changed(write: Write, tmp_path: Path) -> None:
    path = write(lambda t, layer, h: (1, 1, 1))
    first = read_strategy(path)
    assert read_strategy(path) is first
    assert (first.steps, first.layers, first.heads) == (STEPS, LAYERS, HEADS)
    write(lambda t, layer, h: (3, 1, 15))
    assert read_strategy(path).windows[0, 0] == ((3, 1, 15),) * HEADS
    packed = tmp_path / "strategy.json.gz"
    packed.write_bytes(gzip.compress(Path(path).read_bytes()))
    assert read_strategy(str(packed)).windows[1, 0] == ((3, 1, 15),) * HEADS
    with pytest.raises(ConfigError, match=r"cannot be read: .*nowhere"):
        read_strategy(str(tmp_path / "nowhere.json"))


def test_it_needs_its_file() -> None:
    q, k, v = tensors(Place(grid=GRID))
    with pytest.raises(ConfigError, match="needs the option 'mask_strategy_file_path'"):
        call(q, k, v, Place(grid=GRID, step=0, layer=0))
