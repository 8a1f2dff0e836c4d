"""`vmoba_attn` against its mask: choices of chunks against plain Python, then outputs and gradients in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import ConfigError, InvalidInputError
from polyattn.methods.video.vmoba import chunk_scores, chunks_of, select_chunks, vmoba_mask
from polyattn.video import Place

from .video_inputs import tensors

NAME = "vmoba_attn"
OPTIONS: dict[str, Any] = {
    "temporal_chunk_size": 2,
    "temporal_topk": 2,
    "spatial_chunk_size": [2, 3],
    "spatial_topk": 2,
    "st_chunk_size": [1, 4, 3],
    "st_topk": 3,
    "first_full_step": 0,
}
GRID = (5, 4, 6)
"""Frames in twos leave one over."""
CUTS = ((2,), (2, 3), (1, 4, 3))
KEPT = (2, 2, 3)
SCOPES = ("query_head", "block", "overall", "head_global")
MODES = [("topk", scope) for scope in SCOPES if scope != "block"] + [("threshold", scope) for scope in SCOPES]


def configure(**options: Any) -> None:
    polyattn.configure(attention_backend_config={NAME: {**OPTIONS, **options}})


def chunk_of(token: int, cut: tuple[int, ...]) -> int:
    """The chunk of a token, from its number alone."""
    _, H, W = GRID
    frame, row, column = token // (H * W), token // W % H, token % W
    t, h, w = {1: (cut[0], H, W), 2: (GRID[0], *cut), 3: cut}[len(cut)]
    return ((frame // t) * (H // h) + row // h) * (W // w) + column // w


def by_loop(q: Tensor, k: Tensor, cut: tuple[int, ...], kept: int, threshold: float | None, scope: str) -> Tensor:
    """The mask in plain Python, of float64 numbers: one sample at a time, one score after the other."""
    B, S, H, D = q.shape
    own = [chunk_of(token, cut) for token in range(S)]
    C, group = max(own) + 1, H // k.shape[2]
    mask = torch.zeros(B, H, S, S, dtype=torch.bool)
    for b in range(B):
        score: dict[tuple[int, int, int], float] = {}
        for h, c in itertools.product(range(H), range(C)):
            members = [token for token in range(S) if own[token] == c]
            mean = [sum(k[b, token, h // group, d].item() for token in members) / len(members) for d in range(D)]
            for s in range(S):
                score[h, s, c] = sum(x * y for x, y in zip(q[b, s, h].tolist(), mean, strict=True))
        parts: dict[Any, list[tuple[int, int, int]]] = {}
        for h, s, c in score:
            part = {"query_head": (h, s), "block": c, "overall": 0, "head_global": h}[scope]
            parts.setdefault(part, []).append((h, s, c))
        for members_of in parts.values():
            fixed = [one for one in members_of if one[2] == own[one[1]]]
            others = sorted((one for one in members_of if one[2] != own[one[1]]), key=score.__getitem__, reverse=True)
            if threshold is None:
                queries = len({one[:2] for one in members_of})
                chosen = fixed + others[: kept * queries - len(fixed)]
            else:
                low, high = min(score[one] for one in members_of), max(score[one] for one in members_of)
                weight = {one: (score[one] - low) / (high - low) for one in members_of}
                total, held, chosen = sum(weight.values()), sum(weight[one] for one in fixed), list(fixed)
                for one in others:
                    if held >= threshold * total:
                        break
                    chosen.append(one)
                    held += weight[one]
            for h, s, c in chosen:
                mask[b, h, s, [token for token in range(S) if own[token] == c]] = True
    return mask


def mask_of(q: Tensor, k: Tensor, kind: int, threshold: float | None, scope: str) -> Tensor:
    chunks = chunks_of(GRID, CUTS[kind], q.device)
    scores = chunk_scores(q.transpose(1, 2), k.transpose(1, 2), chunks)
    return vmoba_mask(select_chunks(scores, chunks.own, KEPT[kind], threshold, scope), chunks.own)


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize(("mode", "scope"), MODES)
@pytest.mark.parametrize("kind", range(3))
def test_the_mask_is_that_of_a_loop(kind: int, mode: str, scope: str) -> None:
    q, k, _ = tensors(120, heads=2, kv_heads=1, width=4)
    threshold = 0.45 if mode == "threshold" else None
    found = mask_of(q, k, kind, threshold, scope)
    assert torch.equal(found, by_loop(q, k, CUTS[kind], KEPT[kind], threshold, scope))
    assert 0.1 < found.double().mean() < 0.9


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize(("mode", "scope"), MODES)
@pytest.mark.parametrize("kind", range(3))
def test_it_is_attention_under_its_mask(kind: int, mode: str, scope: str) -> None:
    configure(moba_select_mode=mode, moba_threshold=0.45, moba_threshold_type=scope)
    q, k, v = (t.requires_grad_() for t in tensors(120, kv_heads=2))
    out = polyattn.attention(q, k, v, backend=NAME, scale=0.3, place=Place(grid=GRID, layer=kind))
    with torch.no_grad():
        mask = mask_of(q, k, kind, 0.45 if mode == "threshold" else None, scope)
    right = polyattn.attention(q, k, v, attn_mask=mask, scale=0.3, backend="reference")
    torch.testing.assert_close(out, right)
    dout = torch.randn(right.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, (q, k, v), dout)
    for got, want in zip(found, torch.autograd.grad(right, (q, k, v), dout), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("wrong", ["chunks shifted", "another cut", "another scope"])
def test_what_is_wrong_is_seen(wrong: str) -> None:
    configure(moba_select_mode="topk")
    q, k, v = tensors(120)
    out = polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID, layer=2))
    mask = mask_of(
        q, k, 1 if wrong == "another cut" else 2, None, "overall" if wrong == "another scope" else "query_head"
    )
    if wrong == "chunks shifted":
        mask = mask.roll(3, -1)
    other = polyattn.attention(q, k, v, attn_mask=mask, backend="reference")
    assert (out - other).norm() > 0.1 * out.norm()


LIMITS: dict[str, dict[str, Any]] = {
    "as many as there are": {"moba_select_mode": "topk", "temporal_topk": 3, "spatial_topk": 9, "st_topk": 99},
    **{f"a threshold of 1, {scope}": {"moba_threshold": 1.0, "moba_threshold_type": scope} for scope in SCOPES},
    "a threshold above 1": {"moba_threshold": 1.5},
    "one chunk": {"temporal_chunk_size": 9, "spatial_chunk_size": [4, 6], "st_chunk_size": [5, 4, 6]},
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("layer", range(3))
def test_the_dense_limit(limit: str, layer: int) -> None:
    configure(**LIMITS[limit])
    q, k, v = tensors(120)
    out = polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID, layer=layer))
    torch.testing.assert_close(out, polyattn.attention(q, k, v))


def test_one_chunk_for_each_query_is_its_own() -> None:
    configure(moba_select_mode="topk", temporal_topk=1, spatial_topk=1, st_topk=1)
    q, k, v = tensors(120)
    for layer in range(3):
        own = torch.tensor([chunk_of(token, CUTS[layer]) for token in range(120)])
        right = polyattn.attention(q, k, v, attn_mask=(own[:, None] == own)[None, None])
        torch.testing.assert_close(
            polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID, layer=layer)), right
        )


@pytest.mark.parametrize("scope", SCOPES)
def test_a_higher_threshold_keeps_no_less(scope: str) -> None:
    q, k, _ = tensors(120)
    before = mask_of(q, k, 1, 0.0, scope)
    shares = []
    for threshold in (0.1, 0.25, 0.5, 0.8, 0.95, 1.0):
        mask = mask_of(q, k, 1, threshold, scope)
        assert not (before & ~mask).any()
        shares.append(mask.double().mean())
        before = mask
    assert shares[0] < shares[3] < shares[5] == 1


def test_scores_that_are_all_alike_weigh_alike() -> None:
    scores = torch.zeros(1, 1, 6, 3)
    own = torch.tensor([0, 0, 1, 1, 2, 2])
    assert select_chunks(scores, own, 1, 0.6, "query_head").sum(-1).unique().tolist() == [2]


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    """Whatever the scope, what the other samples of a batch hold changes nothing."""
    for mode, scope in MODES:
        configure(moba_select_mode=mode, moba_threshold_type=scope)
        q, k, v = tensors(120)
        place = Place(grid=GRID, layer=0)
        both = polyattn.attention(q, k, v, backend=NAME, place=place)
        alone = polyattn.attention(q[1:], k[1:], v[1:], backend=NAME, place=place)
        torch.testing.assert_close(both[1:], alone)


def test_layers_take_turns() -> None:
    """From the first layer that is not dense on: cycles of two temporal layers, one spatial, none of the third."""
    configure(temporal_layer=2, st_layer=0, first_full_layer=1, moba_select_mode="topk", st_chunk_size=[4, 4, 4])
    q, k, v = tensors(120)
    outs = [polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID, layer=i)) for i in range(8)]
    with torch.no_grad():
        masks = [mask_of(q, k, kind, None, "query_head") for kind in (0, 1)]
    temporal, spatial = (polyattn.attention(q, k, v, attn_mask=mask) for mask in masks)
    dense = polyattn.attention(q, k, v)
    for out, right in zip(outs, [dense, *(temporal, temporal, spatial) * 2, temporal], strict=True):
        torch.testing.assert_close(out, right)
    configure(spatial_layer=0, st_layer=0)  # one cut for all layers: none needs its number
    torch.testing.assert_close(
        polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID)),
        polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID, layer=5)),
    )


def test_its_first_steps_are_dense() -> None:
    configure(first_full_step=12)
    q, k, v = tensors(120)
    dense = polyattn.attention(q, k, v)
    for step, same in ((0, True), (11, True), (12, False)):
        out = polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID, layer=0, step=step))
        assert torch.allclose(out, dense) == same


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)])
def test_other_dtypes(dtype: torch.dtype, limit: float) -> None:
    configure(moba_select_mode="topk")
    q, k, v = (t.to(dtype) for t in tensors(120))
    out = polyattn.attention(q, k, v, backend=NAME, place=Place(grid=GRID, layer=1, branch="uncond"))
    right = polyattn.attention(*(t.double() for t in (q, k, v)), attn_mask=mask_of(q, k, 1, None, "query_head"))
    assert out.dtype == dtype
    assert (out.double() - right).norm() < limit * right.norm()


def test_explain_shows_its_kernel() -> None:
    configure()
    given = [t.float() for t in tensors(120)]
    for some in (given, [t.to("meta") for t in given]):
        (inner,) = polyattn.explain(polyattn.attention, *some, backend=NAME, place=Place(grid=GRID, layer=0)).inner
        assert (inner.request.family, inner.request.lse) == ("varlen", True)


WRONG: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"layer": 0}, InvalidInputError, r"works on a grid, and the place has none"),
    (
        {},
        {"grid": GRID},
        InvalidInputError,
        r"take turns with 3 cuts .* needs to know the layer.*Place\(layer=\.\.\.\)",
    ),
    (
        *({"spatial_chunk_size": [3, 3]}, {"grid": GRID, "layer": 0}, InvalidInputError),
        r"spatial_chunk_size=\[3, 3\] does not divide the grid \(5, 4, 6\): H=4 is no multiple of 3; choose a chunk",
    ),
    (
        *({"spatial_chunk_size": [2, 4]}, {"grid": GRID, "layer": 0}, InvalidInputError),
        r"spatial_chunk_size=\[2, 4\] does not divide .* W=6 is no multiple of 4",
    ),
    (
        *({"st_chunk_size": [2, 2, 2]}, {"grid": GRID, "layer": 0}, InvalidInputError),
        r"st_chunk_size=\[2, 2, 2\] does not divide .* T=5 is no multiple of 2",
    ),
    ({}, {"grid": (4, 4, 6), "text": (0, 24), "layer": 0}, InvalidInputError, r"place has text=\(0, 24\), and text is"),
    ({"first_full_step": 2}, {"grid": GRID, "layer": 0}, InvalidInputError, "first_full_step=2 needs to know the step"),
    (
        *({"moba_select_mode": "topk", "moba_threshold_type": "block"}, {"grid": GRID, "layer": 0}, ConfigError),
        "moba_threshold_type='block' ranks the queries of a chunk, .* choose query_head, head_global or overall",
    ),
    (
        *({"temporal_layer": 0, "spatial_layer": 0, "st_layer": 0}, {"grid": GRID, "layer": 0}, ConfigError),
        "temporal_layer, spatial_layer and st_layer are all 0, .* set one of them",
    ),
]


@pytest.mark.parametrize(("options", "place", "error", "message"), WRONG)
def test_wrong_places_and_options(
    options: dict[str, Any], place: dict[str, Any], error: type[Exception], message: str
) -> None:
    configure(**options)
    with pytest.raises(error, match=message):
        polyattn.attention(*tensors(120), backend=NAME, place=Place(**place))


def test_sizes_of_chunks_must_be_given() -> None:
    polyattn.configure()
    with pytest.raises(ConfigError, match="temporal_chunk_size"):
        polyattn.attention(*tensors(120), backend=NAME, place=Place(grid=GRID, layer=0, step=12))
