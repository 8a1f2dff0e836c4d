"""`sparse_video_gen_2_attn`: k-means and the choice of clusters against plain Python, attention against its mask.

Labels are fixed wherever results are compared: two ways to compute k-means may part at a rounding.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.methods.video import svg2
from polyattn.methods.video.svg2 import Clusters, cluster_map, k_means
from polyattn.video import Place

from .video_inputs import tensors

NAME = "sparse_video_gen_2_attn"
OPTIONS: dict[str, Any] = {
    "svg2_num_q_centroids": 6,
    "svg2_num_k_centroids": 9,
    "svg2_top_p_kmeans": 0.7,
    "svg2_first_layers_fp": 0.0,
    "svg2_first_times_fp": 0.0,
}
PLACES = {
    "no text": Place(grid=(3, 7, 7)),
    "text behind": Place(grid=(4, 5, 6), text=(0, 9)),
    "text in front": Place(grid=(4, 5, 6), text=(70, 0)),
    "padded text on both sides": Place(grid=(4, 5, 6), text=(5, 40), valid_text=(3, 17)),
    "padding alone": Place(grid=(4, 5, 6), text=(0, 6), valid_text=(0, 0)),
}


def configure(**options: Any) -> None:
    polyattn.configure(attention_backend_config={NAME: {**OPTIONS, **options}})


def labels_like(q: Tensor, k: Tensor, clusters: tuple[int, int], place: Place) -> tuple[Tensor, Tensor]:
    """Clusters of very unequal sizes, one of them empty, for the tokens of the grid: int64 [B, H, cells]."""
    assert place.grid is not None
    generator = torch.Generator().manual_seed(3)
    made = []
    for tensor, count in zip((q, k), clusters, strict=True):
        weights = torch.arange(count, dtype=torch.float64) ** 2
        shape = (tensor.shape[0] * tensor.shape[2], math.prod(place.grid))
        labels = torch.multinomial(weights.expand(shape[0], -1), shape[1], True, generator=generator)
        made.append(labels.view(tensor.shape[0], tensor.shape[2], -1))
    return made[0], made[1]


def mask_by_loop(place: Place, rows: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """The mask of a map in plain Python, token by token: what a token is follows from its number."""
    assert place.grid is not None
    B, H, _ = rows.shape
    (front, back), cells = place.text, math.prod(place.grid)
    valid_front, valid_back = place.text if place.valid_text is None else place.valid_text
    total, group = front + cells + back, H // keys.shape[1]

    def kind(token: int) -> str:
        if front <= token < front + cells:
            return "video"
        return "text" if token < valid_front or front + cells <= token < front + cells + valid_back else "padding"

    kinds = [kind(token) for token in range(total)]
    mask = torch.zeros(B, H, total, total, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            row, col, allowed = rows[b, h].tolist(), keys[b, h // group].tolist(), seen[b, h].tolist()
            for q in range(total):
                for k in range(total):
                    if kinds[q] == kinds[k] == "video":
                        mask[b, h, q, k] = allowed[row[q - front]][col[k - front]]
                    elif "padding" in (kinds[q], kinds[k]):
                        mask[b, h, q, k] = kinds[q] == kinds[k]
                    else:
                        mask[b, h, q, k] = True
    return mask


def under_labels(monkeypatch: pytest.MonkeyPatch, rows: Tensor, keys: Tensor, seen: Tensor) -> None:
    """The method with these clusters and this map in place of its own."""
    B, H, C_q, C_k = seen.shape

    def clusters(*given: Any) -> tuple[Clusters, Clusters]:
        return Clusters(rows, torch.zeros(B, H, C_q, 1)), Clusters(keys, torch.zeros(B, keys.shape[1], C_k, 1))

    monkeypatch.setattr(svg2.SVG2, "_clusters", clusters)
    monkeypatch.setattr(svg2, "cluster_map", lambda *given: seen)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("density", [0.2, 0.7])
def test_a_given_map_is_attention_under_its_mask(case: str, density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    place = PLACES[case]
    assert place.tokens is not None
    configure()
    q, k, v = tensors(place.tokens, heads=2, kv_heads=1)
    rows, keys = labels_like(q, k, (6, 9), place)
    seen = torch.rand(2, 2, 6, 9, generator=torch.Generator().manual_seed(4)) < density
    under_labels(monkeypatch, rows, keys, seen)
    out = polyattn.attention(q, k, v, backend=NAME, place=place)
    mask = mask_by_loop(place, rows, keys, seen)
    torch.testing.assert_close(out, polyattn.attention(q, k, v, attn_mask=mask, backend="reference"))
    for wrong in (mask.roll(1, -1), mask_by_loop(place, rows, keys, seen.roll(1, -1))):
        assert (out - polyattn.attention(q, k, v, attn_mask=wrong, backend="reference")).norm() > 0.05 * out.norm()


def test_rows_that_see_nothing_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    place = PLACES["no text"]
    assert place.tokens is not None
    configure()
    q, k, v = tensors(place.tokens)
    rows, keys = labels_like(q, k, (6, 9), place)
    seen = torch.ones(2, 4, 6, 9, dtype=torch.bool)
    seen[:, :, 5] = False
    under_labels(monkeypatch, rows, keys, seen)
    out = polyattn.attention(q, k, v, backend=NAME, place=place).transpose(1, 2)
    assert torch.equal(out == 0, (rows == 5)[..., None].expand(out.shape))


def test_k_means_is_that_of_a_loop() -> None:
    q, _, _ = tensors(60, heads=2, batch=1, width=3)
    points = q.transpose(1, 2)
    # The last one is nobody's, and stays where it is.
    start = torch.cat([points[:, :, :4], points.new_full((1, 2, 1, 3), 50.0)], 2)
    for rounds in (0, 1, 3):
        found = k_means(points, start, rounds)
        for h in range(2):
            centroids, data = start[0, h].tolist(), points[0, h].tolist()

            def nearest(point: list[float], among: list[list[float]]) -> int:
                return min(range(len(among)), key=lambda i: math.dist(point, among[i]))

            labels = [nearest(point, centroids) for point in data]
            for number in range(rounds):
                if number:
                    labels = [nearest(point, centroids) for point in data]
                for c in range(len(centroids)):
                    own = [point for point, label in zip(data, labels, strict=True) if label == c]
                    if own:
                        centroids[c] = [sum(column) / len(own) for column in zip(*own, strict=True)]
            torch.testing.assert_close(found.centroids[0, h], torch.tensor(centroids, dtype=torch.float64))
            # Of the last round: the centroids are the means of these.
            assert found.labels[0, h].tolist() == labels
    assert torch.equal(k_means(points, start, 500).centroids, k_means(points, start, 900).centroids)


def test_k_means_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    points = tensors(60)[0].transpose(1, 2)
    right = k_means(points, points[:, :, :5], 2)
    monkeypatch.setattr(svg2, "_DISTANCES", 7 * 2 * 4 * 5)
    assert torch.equal(k_means(points, points[:, :, :5], 2).labels, right.labels)


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("least", [0.0, 0.25])
def test_the_choice_of_clusters_is_that_of_a_loop(top_p: float, least: float) -> None:
    q, k, _ = tensors(60, kv_heads=2)
    rows, keys = (k_means(t.transpose(1, 2), t.transpose(1, 2)[:, :, :n], 2) for t, n in ((q, 5), (k, 9)))
    found = cluster_map(rows, keys, top_p, least)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(5)).tolist():
        labels = keys.labels[b, h // 2].tolist()
        one = rows.centroids[b, h, i].tolist()
        weight = [
            labels.count(j) * math.exp(sum(x * y for x, y in zip(one, other, strict=True)) / math.sqrt(16))
            for j, other in enumerate(keys.centroids[b, h // 2].tolist())
        ]
        chosen: set[int] = set()
        held = 0.0
        for j in sorted(range(9), key=weight.__getitem__, reverse=True):
            if held > top_p * sum(weight) and len(chosen) >= int(least * 9):
                break
            chosen.add(j)
            held += weight[j]
        assert set(found[b, h, i].nonzero().flatten().tolist()) == chosen


LIMITS = {
    "top_p": {"svg2_top_p_kmeans": 1.0},
    "all clusters in any case": {"svg2_min_kc_ratio": 1.0},
    "one cluster": {"svg2_num_k_centroids": 1, "svg2_num_q_centroids": 1},
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("case", ["no text", "text behind", "text in front"])
def test_the_dense_limit(limit: str, case: str) -> None:
    place = PLACES[case]
    assert place.tokens is not None
    configure(**LIMITS[limit])
    q, k, v = tensors(place.tokens)
    out = polyattn.attention(q, k, v, backend=NAME, place=place)
    torch.testing.assert_close(out, polyattn.attention(q, k, v))
    configure(svg2_min_kc_ratio=0.0)
    assert not torch.allclose(polyattn.attention(q, k, v, backend=NAME, place=place), out)


def test_more_clusters_than_tokens() -> None:
    """Each token is its own cluster then, and centroids are exact."""
    configure(svg2_num_q_centroids=300, svg2_num_k_centroids=1000, svg2_min_kc_ratio=0.0, svg2_kmeans_iter_init=1)
    q, k, v = tensors(24)
    out = polyattn.attention(q, k, v, backend=NAME, place=Place(grid=(2, 3, 4)))
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).mT / 4).softmax(-1)
    ordered, where = scores.sort(-1, descending=True)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, where, ordered.cumsum(-1) - ordered <= 0.7)
    torch.testing.assert_close(out, polyattn.attention(q, k, v, attn_mask=mask))


def test_centroids_go_on_from_step_to_step() -> None:
    """As `k_means` from what was kept, each branch by itself; without a dict of the run every call begins anew."""
    configure(svg2_kmeans_iter_init=2, svg2_kmeans_iter_step=1)
    q, k, v = tensors(120)
    kept: dict[str, dict[str, Any]] = {"cond": {}, "uncond": {}}
    inputs = {"cond": (q, k), "uncond": (q.flip(1), k.flip(1))}

    def run(branch: str, step: int) -> Tensor:
        place = Place(grid=(4, 5, 6), step=step, branch=branch, kept=kept[branch])
        out: Tensor = polyattn.attention(*inputs[branch], v, backend=NAME, place=place)
        return out

    first = {branch: run(branch, 0) for branch in kept}
    before = {branch: own[svg2.KEPT] for branch, own in kept.items()}
    start = q.transpose(1, 2)[:, :, torch.randperm(120, generator=torch.Generator().manual_seed(0))[:6]]
    torch.testing.assert_close(before["cond"][0], k_means(q.transpose(1, 2), start, 2).centroids)
    assert not torch.equal(before["cond"][0], before["uncond"][0])
    run("cond", 1)
    after = kept["cond"][svg2.KEPT]
    torch.testing.assert_close(after[1], k_means(k.transpose(1, 2), before["cond"][1], 1).centroids)
    assert kept["uncond"][svg2.KEPT] is before["uncond"]
    place = Place(grid=(4, 5, 6), step=0, branch="cond")
    assert torch.equal(polyattn.attention(q, k, v, backend=NAME, place=place), first["cond"])
    configure(svg2_kmeans_iter_init=2, svg2_kmeans_iter_step=0)
    run("cond", 2)
    assert torch.equal(kept["cond"][svg2.KEPT][0], after[0])


def test_what_is_kept_belongs_to_one_layer() -> None:
    configure()
    kept: dict[str, Any] = {}
    polyattn.attention(*tensors(120), backend=NAME, place=Place(grid=(4, 5, 6), kept=kept))
    with pytest.raises(InvalidInputError, match=r"keeps centroids of another call, .* give each its own Place\(kept="):
        polyattn.attention(*tensors(120, heads=8), backend=NAME, place=Place(grid=(4, 5, 6), kept=kept))


def test_explaining_keeps_nothing_and_shows_the_kernel() -> None:
    configure()
    kept: dict[str, Any] = {}
    given = [t.float() for t in tensors(129)]
    for some in (given, [t.to("meta") for t in given]):
        place = Place(grid=(4, 5, 6), text=(0, 9), kept=kept)
        (inner,) = polyattn.explain(polyattn.attention, *some, backend=NAME, place=place).inner
        assert (inner.request.family, inner.request.block_sizes) == ("block_sparse", True)
    assert not kept


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (6, 6), (4, 1)])
def test_heads_that_take_turns(heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long calls hold copies of some heads at a time: the same numbers, and `explain` shows one call for all turns."""
    configure()
    given = tensors(129, heads=heads, kv_heads=kv_heads)

    def call(function: Any, *before: Any) -> Any:
        place = Place(grid=(4, 5, 6), text=(0, 9), kept={})
        return function(*before, *given, backend=NAME, place=place)

    together = call(polyattn.attention)
    monkeypatch.setattr(svg2, "_LONG", 0)
    assert torch.equal(call(polyattn.attention), together)
    said = call(polyattn.explain, polyattn.attention).inner
    assert len(said) == len({one.request.heads for one in said}) <= 2


def test_first_layers_and_steps_are_dense() -> None:
    """Shares: of 10 layers at 0.15 those below 1.5, of 20 steps at 0.1 those below 2."""
    configure(svg2_first_layers_fp=0.15, svg2_first_times_fp=0.1, svg2_min_kc_ratio=0.0)
    q, k, v = tensors(120)
    dense = polyattn.attention(q, k, v)
    for layer, step, same in ((0, 5, True), (1, 5, True), (2, 5, False), (2, 1, True), (2, 2, False)):
        place = Place(grid=(4, 5, 6), layer=layer, layers=10, step=step, steps=20)
        assert torch.allclose(polyattn.attention(q, k, v, backend=NAME, place=place), dense) == same
    place = Place(grid=(4, 5, 6), layer=1, layers=10, step=5, steps=20)
    (said,) = polyattn.explain(polyattn.attention, q, k, v, backend=NAME, place=place).inner
    assert (said.rule, said.why) == (NAME, "the first 2 of 10 layers run dense (svg2_first_layers_fp)")


def test_step_zero_may_cluster_for_the_steps_after_it() -> None:
    configure(svg2_first_layers_fp=0.15, svg2_first_times_fp=0.1, svg2_zero_step_kmeans_init=True)
    q, k, v = tensors(120)
    dense = polyattn.attention(q, k, v)
    made = {}
    for layer, step in ((0, 0), (2, 0), (2, 1)):
        kept: dict[str, Any] = {}
        place = Place(grid=(4, 5, 6), layer=layer, layers=10, step=step, steps=20, kept=kept)
        torch.testing.assert_close(polyattn.attention(q, k, v, backend=NAME, place=place), dense)
        made[layer, step] = bool(kept)
    assert made == {(0, 0): False, (2, 0): True, (2, 1): False}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)])
def test_other_dtypes(dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    place = PLACES["padded text on both sides"]
    assert place.tokens is not None
    configure()
    q, k, v = (t.to(dtype) for t in tensors(place.tokens, heads=2, kv_heads=2))
    rows, keys = labels_like(q, k, (6, 9), place)
    seen = torch.rand(2, 2, 6, 9, generator=torch.Generator().manual_seed(4)) < 0.5
    under_labels(monkeypatch, rows, keys, seen)
    out = polyattn.attention(q, k, v, backend=NAME, place=place)
    mask = mask_by_loop(place, rows, keys, seen)
    right = polyattn.attention(*(t.double() for t in (q, k, v)), attn_mask=mask, backend="reference")
    assert out.dtype == dtype
    assert (out.double() - right).norm() < limit * right.norm()


WRONG: list[tuple[dict[str, Any], Place, str]] = [
    ({}, Place(step=1), "works on a grid, and the place has none"),
    ({}, Place(grid=(4, 5, 7)), "has 120 tokens and its place 140"),
    ({"svg2_first_times_fp": 0.2}, Place(grid=(4, 5, 6)), "svg2_first_times_fp=0.2 needs to know the step"),
    ({"svg2_first_times_fp": 0.2}, Place(grid=(4, 5, 6), step=3), "svg2_first_times_fp=0.2 needs to know the steps"),
    ({"svg2_first_layers_fp": 0.1}, Place(grid=(4, 5, 6)), "svg2_first_layers_fp=0.1 needs to know the layer"),
    (
        *({"svg2_zero_step_kmeans_init": True, "svg2_first_times_fp": 0.2}, Place(grid=(4, 5, 6))),
        "svg2_zero_step_kmeans_init needs to know the step",
    ),
]


@pytest.mark.parametrize(("options", "place", "message"), WRONG)
def test_wrong_places(options: dict[str, Any], place: Place, message: str) -> None:
    configure(**options)
    with pytest.raises(InvalidInputError, match=message):
        polyattn.attention(*tensors(120), backend=NAME, place=place)


def test_gradients_and_scales_are_refused() -> None:
    configure()
    q, k, v = tensors(120)
    with pytest.raises(UnsupportedRequestError, match="grad"):
        polyattn.attention(q.requires_grad_(), k, v, backend=NAME, place=Place(grid=(4, 5, 6)))
    with pytest.raises(UnsupportedRequestError, match="scale"):
        polyattn.attention(q.detach(), k, v, scale=0.1, backend=NAME, place=Place(grid=(4, 5, 6)))


def test_blocks_hold_each_token_once() -> None:
    """An order and its way back are the identity, for any labels; blocks hold the tokens of one cluster."""
    q, k, _ = tensors(200)
    rows, _ = labels_like(q, k, (6, 9), Place(grid=(5, 5, 8)))
    side = svg2._Side.of(rows, 6, 64)
    turned = q.transpose(1, 2)
    assert torch.equal(side.back(side.filled(turned)), turned)
    assert side.sizes.sum(-1).unique().tolist() == [200]
    packed = side.packed(turned)
    for b, h in ((b, h) for b in range(rows.shape[0]) for h in range(rows.shape[1])):
        assert rows[b, h][side.order[b, h]].tolist() == sorted(rows[b, h].tolist())
        assert torch.equal(packed[b, h][side.place[b, h]], turned[b, h])
        for start, size, cluster in zip(side.starts[b, h], side.sizes[b, h], side.cluster[b, h], strict=True):
            held = rows[b, h][side.order[b, h, start : start + size]]
            assert bool((held == cluster).all())
