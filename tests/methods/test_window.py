"""`window_video_attn` against its mask: the mask against a loop, then outputs and gradients in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import InvalidInputError
from polyattn.methods.video.window import window_mask
from polyattn.video import Place, Run
from polyattn.video import place as run_place

NAME = "window_video_attn"
HEADS = 4


def configure(**options: Any) -> None:
    polyattn.configure(attention_backend_config={NAME: options})


def tensors(tokens: int, *, heads: int = HEADS, kv_heads: int = HEADS, batch: int = 2, **kind: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(batch, tokens, n, 16) for n in (heads, kv_heads, kv_heads)]
    kind = {"dtype": torch.float64, **kind}
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(**kind) for shape in shapes]


def under_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **more: Any) -> Tensor:
    out: Tensor = polyattn.attention(q, k, v, attn_mask=mask.to(q.device), backend="reference", **more)
    return out


CASES: dict[str, tuple[Place, tuple[int, int, int], tuple[int, ...]]] = {
    "tiles divide the grid": (Place(grid=(4, 6, 8)), (2, 3, 4), (1, 0, 1)),
    "ragged on every axis": (Place(grid=(5, 7, 9)), (2, 3, 4), (1, 1, 0)),
    "smaller than a tile": (Place(grid=(1, 2, 3)), (4, 4, 4), (0, 0, 0)),
    "text behind": (Place(grid=(5, 4, 6), text=(0, 9)), (2, 2, 4), (1, 0, 0)),
    "text in front": (Place(grid=(5, 4, 6), text=(7, 0)), (2, 2, 4), (0, 1, 0)),
    "text on both sides, padded": (Place(grid=(3, 4, 5), text=(5, 40), valid_text=(3, 17)), (2, 2, 2), (0, 1, 1)),
    "text that is padding alone": (Place(grid=(3, 4, 5), text=(0, 6), valid_text=(0, 0)), (2, 2, 2), (1, 0, 1)),
    "a reach for each head": (
        *(Place(grid=(5, 6, 7), text=(2, 3)), (2, 2, 2)),
        (0, 0, 0, 1, 0, 2, 0, 3, 0, 2, 2, 3),
    ),
}
cases = pytest.mark.parametrize("case", CASES)


def by_loop(place: Place, tile: tuple[int, ...], reach: tuple[int, ...], heads: int) -> Tensor:
    """The map in plain Python: a token's tile from its number, a key's validity from where its text ends."""
    assert place.grid is not None
    (T, H, W), (front, back) = place.grid, place.text
    valid_front, valid_back = place.text if place.valid_text is None else place.valid_text
    cells = T * H * W

    def tile_of(token: int) -> tuple[int, int, int] | None:
        cell = token - front
        if not 0 <= cell < cells:
            return None
        return cell // (H * W) // tile[0], cell // W % H // tile[1], cell % W // tile[2]

    def valid(token: int) -> bool:
        return token < valid_front or front <= token < front + cells + valid_back

    total = front + cells + back
    mask = torch.zeros(1, heads, total, total, dtype=torch.bool)
    for head, q, k in itertools.product(range(heads), range(total), range(total)):
        here, there = tile_of(q), tile_of(k)
        own = reach if len(reach) == 3 else reach[3 * head : 3 * head + 3]
        near = here is None or there is None or all(abs(a - b) <= r for a, b, r in zip(here, there, own, strict=True))
        mask[0, head, q, k] = near and valid(k)
    return mask


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("case", ["ragged on every axis", "text on both sides, padded", "a reach for each head"])
def test_the_mask_is_that_of_a_loop(case: str) -> None:
    place, tile, reach = CASES[case]
    heads = len(reach) // 3
    mask = window_mask(place, tile, reach, heads)
    assert torch.equal(mask, by_loop(place, tile, reach, heads))


@cases
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_it_is_attention_under_its_mask(case: str, layout: str) -> None:
    place, tile, reach = CASES[case]
    assert place.tokens is not None
    configure(window_tile=list(tile), window_reach=list(reach))
    mask = window_mask(place, tile, reach, HEADS)
    q, k, v = (t.requires_grad_() for t in tensors(place.tokens, kv_heads=2))
    turned = (lambda t: t.transpose(1, 2)) if layout == "BHSD" else (lambda t: t)
    out = polyattn.attention(turned(q), turned(k), turned(v), layout=layout, scale=0.3, backend=NAME, place=place)
    right = under_mask(q, k, v, mask, scale=0.3)
    torch.testing.assert_close(turned(out), right)
    dout = torch.randn(right.shape, dtype=torch.float64)
    found = torch.autograd.grad(turned(out), (q, k, v), dout)
    for got, want in zip(found, torch.autograd.grad(right, (q, k, v), dout), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shift", [1, 2])
def test_a_map_that_is_shifted_by_a_tile_is_seen(shift: int) -> None:
    """The comparison above can fail: another map gives other numbers, in outputs and gradients."""
    place, tile, reach = CASES["tiles divide the grid"]
    assert place.tokens is not None
    configure(window_tile=list(tile), window_reach=list(reach))
    q, k, v = (t.requires_grad_() for t in tensors(place.tokens))
    wrong = under_mask(q, k, v, window_mask(place, tile, reach).roll(shift * tile[2], -1))
    out = polyattn.attention(q, k, v, backend=NAME, place=place)
    assert (out - wrong).norm() > 0.1 * out.norm()
    grads = [torch.autograd.grad(one.square().sum(), k)[0] for one in (out, wrong)]
    assert (grads[0] - grads[1]).norm() > 0.1 * grads[0].norm()


@pytest.mark.parametrize("case", ["ragged on every axis", "text behind", "text on both sides, padded"])
def test_the_dense_limit(case: str) -> None:
    """With a reach as long as the grid it is attention over all tokens but padding."""
    place, tile, _ = CASES[case]
    assert place.tokens is not None
    configure(window_tile=list(tile), window_reach=[9, 9, 9])
    q, k, v = tensors(place.tokens)
    out = polyattn.attention(q, k, v, backend=NAME, place=place)
    right = polyattn.attention(q, k, v)
    if place.valid_text is not None:
        assert not torch.allclose(out, right)
        keep = window_mask(place, tile, (9, 9, 9))[0, 0, 0]
        right = polyattn.attention(q, k[:, keep], v[:, keep])
    torch.testing.assert_close(out, right)


GRID = Place(grid=(4, 4, 6))


@pytest.mark.parametrize(
    ("tile", "reach", "place", "dense"),
    [
        ([2, 2, 2], [1, 1, 2], GRID, True),
        ([2, 2, 2], [9, 9, 9], GRID, True),
        ([2, 2, 2], [1, 1, 1], GRID, False),
        ([4, 4, 9], [0, 0, 0], GRID, True),  # one tile
        ([2, 2, 2], [1, 1, 2], Place(grid=(4, 4, 6), text=(1, 2), valid_text=(1, 2)), True),
        ([2, 2, 2], [1, 1, 2], Place(grid=(4, 4, 6), text=(1, 2), valid_text=(1, 1)), True),
        ([2, 2, 2], [1, 1, 2] * HEADS, GRID, False),
    ],
)
def test_a_window_that_is_the_whole_grid_is_dense_by_a_rule(
    tile: list[int], reach: list[int], place: Place, dense: bool
) -> None:
    configure(window_tile=tile, window_reach=reach)
    assert place.tokens is not None
    q, k, v = tensors(place.tokens)
    (said,) = polyattn.explain(polyattn.attention, q, k, v, backend=NAME, place=place).inner
    assert (said.rule, said.request.family) == ((NAME, "dense") if dense else ("", "block_sparse"))
    if dense:
        counts = [-(-size // step) for size, step in zip((4, 4, 6), tile, strict=True)]
        wanted = f"window_reach={reach} is the whole grid, {counts} tiles of {tile}; a window has a reach below"
        assert wanted in said.why
    with Run() as run, run.at(grid=place.grid, text=place.text, valid_text=place.valid_text):
        polyattn.attention(q, k, v, backend=NAME, place=run_place(layer=0))
    (row,) = run.explain().rows
    assert ("is the whole grid" in row.why) == dense


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)])
def test_other_dtypes(dtype: torch.dtype, limit: float) -> None:
    place, tile, reach = CASES["text behind"]
    assert place.tokens is not None
    configure(window_tile=list(tile), window_reach=list(reach))
    q, k, v = tensors(place.tokens, dtype=dtype)
    out = polyattn.attention(q, k, v, backend=NAME, place=place)
    right = under_mask(q.double(), k.double(), v.double(), window_mask(place, tile, reach))
    assert out.dtype == dtype
    assert (out.double() - right).norm() < limit * right.norm()


def test_its_first_steps_and_layers_are_dense() -> None:
    configure(first_full_step=2, first_full_layer=1, window_tile=[2, 2, 2], window_reach=[0, 0, 0])
    q, k, v = tensors(4 * 4 * 4)
    dense = polyattn.attention(q, k, v)
    sparse = {}
    for step, layer in itertools.product(range(4), range(3)):
        for number in (layer, torch.tensor(layer)):
            place = Place(grid=(4, 4, 4), step=step, layer=number)
            out = polyattn.attention(q, k, v, backend=NAME, place=place)
            sparse[step, layer] = not torch.allclose(out, dense)
    assert sparse == {(step, layer): step >= 2 and layer >= 1 for step, layer in sparse}


WRONG: list[tuple[dict[str, Any], Place, str]] = [
    ({}, Place(step=1), r"works on a grid, and the place has none: give Place\(grid=\(T, H, W\)"),
    ({}, Place(grid=(2, 4, 9)), r"has 64 tokens and its place 72: grid=\(2, 4, 9\) with text=\(0, 0\)"),
    ({}, Place(grid=(4, 4, 4), text=(0, 1)), r"has 64 tokens and its place 65"),
    ({"first_full_step": 2}, Place(grid=(4, 4, 4)), r"first_full_step=2 needs to know the step"),
    ({"first_full_layer": 2}, Place(grid=(4, 4, 4)), r"first_full_layer=2 needs to know the layer"),
    (
        {"window_reach": [1, 1]},
        Place(grid=(4, 4, 4)),
        r"window_reach has 2 numbers; a call of 4 heads takes 3 .* or 12",
    ),
]


@pytest.mark.parametrize(("options", "place", "message"), WRONG)
def test_wrong_places_and_options(options: dict[str, Any], place: Place, message: str) -> None:
    configure(**options)
    q, k, v = tensors(64)
    with pytest.raises(InvalidInputError, match=message):
        polyattn.attention(q, k, v, backend=NAME, place=place)
