"""`video_sparse_attn` against its definition: the map against a plain loop, then outputs and gradients in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import ConfigError, InvalidInputError
from polyattn.methods.video.vsa import tiles_kept, vsa_reference
from polyattn.video import Place

NAME = "video_sparse_attn"
HEADS = 2

GRIDS: dict[str, Place] = {
    "tiles divide the grid": Place(grid=(4, 8, 12)),
    "ragged on every axis": Place(grid=(5, 7, 9)),
    "smaller than a tile": Place(grid=(1, 2, 3)),
    "text behind": Place(grid=(5, 4, 9), text=(0, 9)),
    "text on both sides, padded": Place(grid=(3, 9, 8), text=(5, 70), valid_text=(3, 17)),
}
grids = pytest.mark.parametrize("case", GRIDS)


def configure(**options: Any) -> None:
    polyattn.configure(attention_backend_config={NAME: options})


def tensors(
    place: Place, *, batch: int = 2, heads: int = HEADS, kv_heads: int = HEADS, width: int = 16
) -> list[Tensor]:
    """Queries, keys and values, and a gate, [B, S, H, D]."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(batch, place.tokens, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def at(place: Place, gate: Tensor | None) -> Place:
    tensors = {} if gate is None else {"gate_compress": gate}
    return Place(grid=place.grid, text=place.text, valid_text=place.valid_text, tensors=tensors)


def call(q: Tensor, k: Tensor, v: Tensor, place: Place, **more: Any) -> Tensor:
    out: Tensor = polyattn.attention(q, k, v, backend=NAME, place=place, **more)
    return out


def reference(q: Tensor, k: Tensor, v: Tensor, place: Place, **more: Any) -> Tensor:
    shared = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(shared, 2) for t in (k, v))
    out, _ = vsa_reference(*(t.transpose(1, 2) for t in (q, k, v)), place, **more)
    return out.transpose(1, 2)


def by_loop(q: Tensor, k: Tensor, place: Place, sparsity: float) -> list[list[set[int]]]:
    """The map of the first batch in plain Python: for each head and tile the tiles that it sees."""
    assert place.grid is not None
    T, H, W = place.grid
    members: dict[tuple[int, int, int], list[int]] = {}
    for t in range(T):
        for h in range(H):
            for w in range(W):
                members.setdefault((t // 4, h // 4, w // 4), []).append(place.text[0] + (t * H + h) * W + w)
    tiles = [members[key] for key in sorted(members)]
    keep = max(1, min(len(tiles), math.ceil((1 - sparsity) * len(tiles))))
    found = []
    for head in range(q.shape[2]):
        means = [[sum(x[0, i, head] for i in tile) / len(tile) for tile in tiles] for x in (q, k)]
        rows = []
        for mine in means[0]:
            scores = [float(mine @ theirs) for theirs in means[1]]
            rows.append(set(sorted(range(len(tiles)), key=lambda n, s=scores: -s[n])[:keep]))  # type: ignore[misc]
        found.append(rows)
    return found


@pytest.mark.parametrize("case", ["ragged on every axis", "text on both sides, padded"])
def test_the_map_is_that_of_a_loop(case: str) -> None:
    place = GRIDS[case]
    q, k, v, _ = tensors(place, batch=1)
    _, chosen = vsa_reference(*(t.transpose(1, 2) for t in (q, k, v)), place, sparsity=0.6)
    found = [[set(row.nonzero()[:, 0].tolist()) for row in head] for head in chosen[0]]
    assert found == by_loop(q, k, place, 0.6)
    assert 1 < len(found[0][0]) < len(found[0])


@pytest.mark.slow(keep=12)
@grids
@pytest.mark.parametrize("sparsity", [0.0, 0.7])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_it_is_its_definition(case: str, sparsity: float, layout: str) -> None:
    """Outputs and gradients, of the gate too; two branches are two batches here."""
    place = GRIDS[case]
    configure(sparsity=sparsity)
    q, k, v, gate = (t.requires_grad_() for t in tensors(place))
    turned = (lambda t: t.transpose(1, 2)) if layout == "BHSD" else (lambda t: t)
    out = turned(call(turned(q), turned(k), turned(v), at(place, gate), layout=layout, scale=0.3))
    right = reference(q, k, v, place, sparsity=sparsity, gate=gate, scale=0.3)
    torch.testing.assert_close(out, right)
    dout = torch.randn(right.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, (q, k, v, gate), dout)
    for got, want in zip(found, torch.autograd.grad(right, (q, k, v, gate), dout), strict=True):
        torch.testing.assert_close(got, want)


def test_heads_that_share_keys() -> None:
    place = GRIDS["ragged on every axis"]
    configure(sparsity=0.5)
    q, k, v, gate = tensors(place, heads=4, kv_heads=2)
    out = call(q, k, v, at(place, gate))
    torch.testing.assert_close(out, reference(q, k, v, place, sparsity=0.5, gate=gate))


def test_it_is_attention_under_a_given_map() -> None:
    """With the map of the reference, and no coarse branch, it is masked attention."""
    place = GRIDS["text behind"]
    configure(sparsity=0.5, coarse="off")
    q, k, v, _ = tensors(place)
    right = reference(q, k, v, place, sparsity=0.5)
    torch.testing.assert_close(call(q, k, v, place), right)
    _, chosen = vsa_reference(*(t.transpose(1, 2) for t in (q, k, v)), place, sparsity=0.5)
    torch.testing.assert_close(reference(q, k, v, place, sparsity=0.5, chosen=chosen), right)


CONTROLS = ["map shifted by one tile", "coarse branch dropped", "gate detached", "scale"]


@pytest.mark.parametrize("control", CONTROLS)
def test_the_comparison_can_fail(control: str) -> None:
    """What is wrong in one of these ways is far outside of the tolerances above."""
    place = GRIDS["tiles divide the grid"]
    configure(sparsity=0.5)
    q, k, v, gate = (t.requires_grad_() for t in tensors(place))
    out = call(q, k, v, at(place, gate))
    wrong: dict[str, Any] = {"sparsity": 0.5, "gate": gate}
    if control == "map shifted by one tile":
        _, chosen = vsa_reference(*(t.transpose(1, 2) for t in (q, k, v)), place, sparsity=0.5)
        wrong["chosen"] = chosen.roll(1, -1)
    elif control == "coarse branch dropped":
        del wrong["gate"]
    elif control == "scale":
        wrong["scale"] = 1.02 * q.shape[-1] ** -0.5
    else:
        wrong["gate"] = gate.detach()
        (right,) = torch.autograd.grad(out.square().sum(), gate)
        assert right.norm() > 0
        assert torch.autograd.grad(reference(q, k, v, place, **wrong).sum(), gate, allow_unused=True) == (None,)
        return
    assert (out - reference(q, k, v, place, **wrong)).norm() > 1e-3 * out.norm()


@grids
def test_the_dense_limits(case: str) -> None:
    """All tiles kept: attention to all but padding, where the gate is 0 or there is none; with weight 1 the coarse
    branch comes on top."""
    place = GRIDS[case]
    q, k, v, gate = tensors(place)
    front, back = place.text
    keep = torch.ones(q.shape[1], dtype=torch.bool)
    if place.valid_text is not None:
        keep[place.valid_text[0] : front] = False
        keep[q.shape[1] - back + place.valid_text[1] :] = False
    dense = polyattn.attention(q, k[:, keep], v[:, keep])
    configure()
    torch.testing.assert_close(call(q, k, v, at(place, torch.zeros_like(gate))), dense)
    torch.testing.assert_close(call(q, k, v, at(place, gate.new_zeros(1, 1, 1, 1))), dense)
    configure(coarse="off")
    torch.testing.assert_close(call(q, k, v, place), dense)
    configure(coarse="one")
    added = call(q, k, v, place)
    torch.testing.assert_close(added, reference(q, k, v, place, sparsity=0.0, gate=torch.ones_like(gate)))
    assert (added - dense).norm() > 1e-2 * dense.norm()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)])
def test_other_dtypes(dtype: torch.dtype, limit: float) -> None:
    """Rounded tensors to both, so that the map is that of the definition."""
    place = GRIDS["text behind"]
    configure(sparsity=0.5)
    q, k, v, gate = (t.to(dtype) for t in tensors(place, width=64))
    out = call(q, k, v, at(place, gate))
    right = reference(q, k, v, place, sparsity=0.5, gate=gate)
    assert out.dtype == dtype
    assert (out.double() - right).norm() < limit * right.norm()


def test_exactly_as_many_tiles_also_where_scores_are_equal() -> None:
    place = Place(grid=(4, 16, 16))
    configure(sparsity=0.8, coarse="off")
    q, k, _, _ = (torch.zeros_like(t) for t in tensors(place))
    # The value of a token is one-hot by tile, so that a row of the result is the share of each tile.
    tile = (torch.arange(16)[:, None] // 4 * 4 + torch.arange(16) // 4).expand(4, 16, 16).flatten()
    v = torch.nn.functional.one_hot(tile, 16).double()[None, :, None].expand(2, -1, HEADS, -1)
    out = call(q, k, v, place)
    seen = out > 0
    assert seen.sum(-1).unique().tolist() == [4]
    torch.testing.assert_close(out[seen], torch.full_like(out[seen], 0.25))


def test_the_published_rule_of_how_many() -> None:
    found = {(sparsity, n): tiles_kept(sparsity, n) for sparsity, n in ((0.0, 7), (0.9, 10), (0.5, 7), (0.99, 5))}
    assert found == {(0.0, 7): 7, (0.9, 10): 1, (0.5, 7): 4, (0.99, 5): 1}


def test_zeros_of_padding_do_not_come_from_tokens() -> None:
    """What fills up a tile repeats a token; an infinite one must not reach the means of other tiles."""
    place = Place(grid=(5, 4, 4))
    configure(sparsity=0.5, coarse="one")
    q, k, v, _ = tensors(place)
    q[:, 0] = torch.inf
    assert call(q, k, v, place)[:, 64:].isfinite().all()


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({}, None, r"needs the gate of its coarse branch, and the place has none: give place\(gate=...\)"),
    (
        {},
        torch.ones(2, 63, HEADS, 16),
        r"gate_compress is \[2, 63, 2, 16\]; a tensor \[B, S, H, D\] = \[2, 64, 2, 16\]",
    ),
    ({}, torch.ones(64), r"gate_compress is \[64\]; a tensor"),
    ({}, 1.0, r"gate_compress is float; a tensor"),
    ({}, torch.ones(1, 1, 1, 1, device="meta"), "gate_compress is on meta, the values on cpu; move them together"),
]


@pytest.mark.parametrize(("options", "gate", "message"), WRONG)
def test_wrong_gates(options: dict[str, Any], gate: Any, message: str) -> None:
    configure(**options)
    place = Place(grid=(4, 4, 4))
    with pytest.raises(InvalidInputError, match=f"{NAME}.*{message}"):
        call(*tensors(place)[:3], at(place, gate))


def test_a_sparsity_that_keeps_nothing() -> None:
    configure(sparsity=1.0)
    place = Place(grid=(4, 4, 4))
    with pytest.raises(ConfigError, match="sparsity=1 keeps no tile; give a share below 1, such as"):
        call(*tensors(place)[:3], place)


def test_wrong_places() -> None:
    configure(coarse="off")
    q, k, v, _ = tensors(Place(grid=(4, 4, 4)))
    with pytest.raises(InvalidInputError, match="works on a grid, and the place has none"):
        call(q, k, v, Place(step=1))
    with pytest.raises(InvalidInputError, match="has 64 tokens and its place 72"):
        call(q, k, v, Place(grid=(2, 4, 9)))


def test_explain_shows_its_kernels() -> None:
    place = GRIDS["text behind"]
    configure(sparsity=0.5)
    q, k, v, gate = tensors(place)
    said = polyattn.explain(polyattn.attention, q, k, v, backend=NAME, place=at(place, gate))
    assert said.backend == NAME
    assert [one.request.family for one in said.inner] == ["block_sparse", "dense"]
    assert said.inner[0].request.block_shape == (64, 64)


def test_under_autocast() -> None:
    """The gate is of the model's own dtype; the result has that of autocast."""
    place = GRIDS["text behind"]
    configure(sparsity=0.5)
    q, k, v, gate = (t.float() for t in tensors(place))
    with torch.autocast("cpu", torch.bfloat16):
        out = call(q, k, v, at(place, gate))
    assert out.dtype == torch.bfloat16
    right = call(*(t.bfloat16() for t in (q, k, v)), at(place, gate))
    assert torch.equal(out, right)


def test_a_compiled_layer_trains_after_inference() -> None:
    """Plans of inference mode serve training; the gate's gradient crosses the end of a graph."""
    place = GRIDS["ragged on every axis"]
    configure(sparsity=0.5)
    inputs = [t.float() for t in tensors(place)]
    with torch.inference_mode():
        call(*inputs[:3], at(place, inputs[3]))

    def layer(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return call(q * 2, k, v, at(place, gate * 2)) + 1

    torch._dynamo.reset()
    grads = []
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        given = [t.clone().requires_grad_() for t in inputs]
        grads.append(torch.autograd.grad(run(*given).square().sum(), given))
    torch.testing.assert_close(*grads)
