"""`sla_attn` and `sage_sla_attn` against two masks over all tokens: maps against loops, then outputs and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import ConfigError, InvalidInputError, UnsupportedRequestError
from polyattn.methods.video.sla import eight_bits, sla_reference, top_blocks
from polyattn.video import Place

from .video_inputs import tensors

NAME, SAGE = "sla_attn", "sage_sla_attn"
BLOCKS = (128, 64)
# Tokens that no block divides, text on either side.
PLACES = {
    "blocks divide it": Place(grid=(4, 8, 16)),
    "ragged": Place(grid=(5, 7, 11)),
    "text on both sides": Place(grid=(3, 9, 13), text=(17, 40)),
    "less than a block": Place(grid=(2, 3, 5)),
}


def learned(width: int = 16, scale: float = 0.3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(width, width, generator=generator, dtype=torch.float64) * scale
    return {"proj_l.weight": weight, "proj_l.bias": torch.linspace(-1, 1, width, dtype=torch.float64) * scale}


def at(place: Place, given: Mapping[str, Tensor] | None = None, **more: Any) -> Place:
    return Place(grid=place.grid, text=place.text, tensors=learned() if given is None else given, **more)


def configure(name: str = NAME, **options: Any) -> None:
    polyattn.configure(attention_backend_config={name: options})


def turned(*given: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in given]


def chosen_by_loop(query: Tensor, key: Tensor, ratio: float) -> list[list[list[set[int]]]]:
    """For each sample, head and block of queries the key blocks of the largest products of means, one at a time."""
    q, k = (tensor.tolist() for tensor in turned(query, key))
    group = len(q[0]) // len(k[0])

    def means(rows: list[list[float]], block: int) -> list[list[float]]:
        parts = [rows[i : i + block] for i in range(0, len(rows), block)]
        return [[sum(column) / len(part) for column in zip(*part, strict=True)] for part in parts]

    found = []
    for b in range(len(q)):
        heads = []
        for h in range(len(q[b])):
            keys = means(k[b][h // group], BLOCKS[1])
            kept = max(1, min(len(keys), int(ratio * len(keys))))
            rows = []
            for row in means(q[b][h], BLOCKS[0]):
                scores = [sum(x * y for x, y in zip(row, one, strict=True)) for one in keys]
                rows.append(set(sorted(range(len(keys)), key=scores.__getitem__)[-kept:]))
            heads.append(rows)
        found.append(heads)
    return found


def as_sets(chosen: Tensor) -> list[list[list[set[int]]]]:
    return [[[set(row) for row in head] for head in sample] for sample in chosen.tolist()]


def by_reference(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, given: Mapping[str, Tensor], **how: str) -> Tensor:
    how = {"feature_map": "softmax", "linear_scope": "all", **how}
    return sla_reference(*turned(q, k, v), chosen, BLOCKS, given, **how).transpose(1, 2)  # type: ignore[arg-type]


def choose(q: Tensor, k: Tensor, ratio: float) -> Tensor:
    keys = -(-k.shape[1] // BLOCKS[1])
    query, key = turned(q, k)
    return top_blocks(query, key, BLOCKS, max(1, int(ratio * keys)))


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_map_is_that_of_a_loop(case: str, kv_heads: int) -> None:
    tokens = PLACES[case].tokens
    assert tokens is not None
    q, k, _ = tensors(tokens, kv_heads=kv_heads)
    for ratio in (0.01, 0.4, 1.0):
        assert as_sets(choose(q, k, ratio)) == chosen_by_loop(q, k, ratio)


def test_the_reference_is_that_of_a_loop() -> None:
    """One token at a time, of one head: which keys are seen exactly, and what the linear branch makes of the others."""
    q, k, v = tensors(200, heads=1, kv_heads=1, batch=1)
    chosen, given = choose(q, k, 0.4), learned()
    right = by_reference(q, k, v, chosen, given, feature_map="elu", linear_scope="complement")[0, :, 0]
    for token in (0, 127, 128, 199):
        seen = [i for i in range(200) if i // BLOCKS[1] in set(chosen[0, 0, token // BLOCKS[0]].tolist())]
        rest = [i for i in range(200) if i not in seen]
        row, keys, values = q[0, token, 0], k[0, :, 0], v[0, :, 0]
        exact = torch.softmax(keys[seen] @ row / 4, 0) @ values[seen]
        weights = (torch.nn.functional.elu(keys[rest]) + 1) @ (torch.nn.functional.elu(row) + 1)
        linear = weights @ values[rest] / (weights.sum() + 1e-5)
        torch.testing.assert_close(right[token], exact + given["proj_l.weight"] @ linear + given["proj_l.bias"])


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("scope", ["all", "complement"])
@pytest.mark.parametrize("feature_map", ["softmax", "elu", "relu"])
def test_it_is_its_reference(case: str, scope: str, feature_map: str) -> None:
    place, how = PLACES[case], {"feature_map": feature_map, "linear_scope": scope}
    assert place.tokens is not None
    configure(topk_ratio=0.4, **how)
    q, k, v = (t.requires_grad_() for t in tensors(place.tokens, kv_heads=2))
    given = {name: t.requires_grad_() for name, t in learned().items()}
    out = polyattn.attention(q, k, v, backend=NAME, place=at(place, given))
    right = by_reference(q, k, v, choose(q, k, 0.4), given, **how)
    torch.testing.assert_close(out, right)
    dout = torch.randn(right.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = (q, k, v, *given.values())
    found = torch.autograd.grad(out, wanted, dout)
    for got, want in zip(found, torch.autograd.grad(right, wanted, dout), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("what", ["map shifted", "linear branch dropped", "complement for all", "projection detached"])
def test_what_is_wrong_is_seen(what: str) -> None:
    """The comparison above can fail: each planted fault gives other numbers, in outputs or gradients."""
    place = PLACES["ragged"]
    assert place.tokens is not None
    configure(topk_ratio=0.4)
    q, k, v = (t.requires_grad_() for t in tensors(place.tokens))
    given = {name: t.requires_grad_() for name, t in learned().items()}
    out = polyattn.attention(q, k, v, backend=NAME, place=at(place, given))
    chosen, how, wrong = choose(q, k, 0.4), {}, given
    if what == "map shifted":
        chosen = (chosen + 1) % -(-place.tokens // BLOCKS[1])
    elif what == "linear branch dropped":
        wrong = {name: t * 0 for name, t in given.items()}
    elif what == "complement for all":
        how = {"linear_scope": "complement"}
    else:
        wrong = {"proj_l.weight": given["proj_l.weight"].detach(), "proj_l.bias": given["proj_l.bias"]}
    other = by_reference(q, k, v, chosen, wrong, **how)
    if what == "projection detached":
        grads = [torch.autograd.grad(one.sum(), given["proj_l.weight"], allow_unused=True)[0] for one in (out, other)]
        assert grads[0].norm() > 0
        assert grads[1] is None
        return
    assert (out - other).norm() > 0.02 * out.norm()
    grads = [torch.autograd.grad(one.square().sum(), v)[0] for one in (out, other)]
    assert (grads[0] - grads[1]).norm() > 0.02 * grads[0].norm()


@pytest.mark.parametrize("scope", ["all", "complement"])
def test_the_dense_limit(scope: str) -> None:
    """All blocks and a projection of zeros: attention. Nothing is left to the complement then: it is 0 and no NaN."""
    place = PLACES["text on both sides"]
    assert place.tokens is not None
    configure(topk_ratio=1.0, linear_scope=scope)
    q, k, v = tensors(place.tokens)
    zeros = {name: torch.zeros_like(t) for name, t in learned().items()}
    out = polyattn.attention(q, k, v, backend=NAME, place=at(place, zeros))
    torch.testing.assert_close(out, polyattn.attention(q, k, v))
    out = polyattn.attention(q, k, v, backend=NAME, place=at(place, {"proj_l.weight": learned()["proj_l.weight"]}))
    assert torch.equal(out, polyattn.attention(q, k, v)) == (scope == "complement")


def test_without_a_projection_it_is_block_sparse_attention() -> None:
    place = PLACES["ragged"]
    assert place.tokens is not None
    configure(topk_ratio=0.3)
    q, k, v = tensors(place.tokens)
    chosen = choose(q, k, 0.3).to(torch.int32)
    counts = torch.full(chosen.shape[:3], chosen.shape[3], dtype=torch.int32)
    right = polyattn.block_sparse_attention(q, k, v, lists=(counts, chosen), block_shape=BLOCKS)
    zeros = {"proj_l.weight": torch.zeros(16, 16)}
    torch.testing.assert_close(polyattn.attention(q, k, v, backend=NAME, place=at(place, zeros)), right)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)])
def test_other_dtypes(dtype: torch.dtype, limit: float) -> None:
    place = PLACES["text on both sides"]
    assert place.tokens is not None
    configure(topk_ratio=0.4)
    q, k, v = (t.to(dtype) for t in tensors(place.tokens))
    out = polyattn.attention(q, k, v, backend=NAME, place=at(place))
    right = by_reference(q, k, v, choose(q, k, 0.4), learned())
    assert out.dtype == dtype
    assert (out.double() - right).norm() < limit * right.norm()


def test_explain_shows_its_kernel() -> None:
    q, k, v = (t.float() for t in tensors(385))
    for given in ((q, k, v), [t.to("meta") for t in (q, k, v)]):
        said = polyattn.explain(polyattn.attention, *given, backend=NAME, place=at(PLACES["ragged"]))
        (inner,) = said.inner
        assert (inner.request.family, inner.request.block_shape) == ("block_sparse", BLOCKS)


def test_sage_rounds_scores_to_eight_bits() -> None:
    """Its error is that of the integers: far from nothing, and far from what a lost block does."""
    place = PLACES["text on both sides"]
    assert place.tokens is not None
    polyattn.configure(attention_backend_config={name: {"topk_ratio": 0.4} for name in (NAME, SAGE)})
    q, k, v = tensors(place.tokens, kv_heads=2, width=64)
    given = learned(64)
    exact, out = (polyattn.attention(q, k, v, backend=name, place=at(place, given)) for name in (NAME, SAGE))
    assert torch.nn.functional.cosine_similarity(out.flatten(), exact.flatten(), 0) > 0.998
    assert 1e-4 < (out - exact).norm() / exact.norm() < 0.06
    lost = by_reference(q, k, v, choose(q, k, 0.4)[..., 1:], given)
    assert (lost - exact).norm() / exact.norm() > 0.06
    # One block of a sample, of one head: by hand.
    mean = k[0, :, 0].mean(0)
    for block, tensor in ((128, q[0, :, 0]), (64, k[0, :, 0] - mean)):
        found = eight_bits(tensor[None, None], block)[0, 0, :block]
        step = tensor[:block].abs().max() / 127
        assert (found / step - (found / step).round()).abs().max() < 1e-9
        assert (found - tensor[:block]).abs().max() <= step / 2 * 1.000001


def test_sage_is_its_own_arithmetic() -> None:
    """SLA of the rounded queries and keys, the map and the linear branch being those of the tensors as they are."""
    place = PLACES["ragged"]
    assert place.tokens is not None
    configure(SAGE, topk_ratio=0.4)
    q, k, v = tensors(place.tokens)
    out = polyattn.attention(q, k, v, backend=SAGE, place=at(place))
    (query, key), chosen = turned(q, k), choose(q, k, 0.4)
    rounded = eight_bits(query, 128), eight_bits(key - key.mean(2, keepdim=True), 64)
    zeros = {"proj_l.weight": torch.zeros(16, 16)}
    exact = by_reference(*(t.transpose(1, 2) for t in rounded), v, chosen, zeros)
    linear = by_reference(q, k, v, chosen, learned()) - by_reference(q, k, v, chosen, zeros)
    torch.testing.assert_close(out, exact + linear)


def test_sage_is_forward_only_and_says_that_it_is_emulated() -> None:
    q, k, v = tensors(64)
    said = polyattn.explain(polyattn.attention, q, k, v, backend=SAGE, place=at(Place(grid=(4, 4, 4))))
    assert [one.request.dtype for one in said.inner] == ["float64"]
    half = [t.bfloat16() for t in (q, k, v)]
    said = polyattn.explain(polyattn.attention, *half, backend=SAGE, place=at(Place(grid=(4, 4, 4))))
    assert [one.request.dtype for one in said.inner] == ["float32"]
    with pytest.raises(UnsupportedRequestError, match="grad"):
        polyattn.attention(q.requires_grad_(), k, v, backend=SAGE, place=at(Place(grid=(4, 4, 4))))


WRONG: list[tuple[dict[str, Any], Place, type[Exception], str]] = [
    ({}, Place(grid=(4, 4, 4)), InvalidInputError, r"place has none: Place\(tensors=\{\"proj_l.weight\": .* Zeros"),
    (
        *({}, Place(grid=(4, 4, 4), tensors={"proj_l.weight": torch.zeros(8, 16)}), InvalidInputError),
        r"proj_l.weight is \[8, 16\]; a tensor \[16, 16\] is needed, D_v=16",
    ),
    (
        *({}, Place(grid=(4, 4, 4), tensors={**learned(), "proj_l.bias": 0.0}), InvalidInputError),
        r"proj_l.bias is float; a tensor \[16\] is needed",
    ),
    (
        *({}, Place(grid=(4, 4, 4), tensors={"proj_l.weight": torch.zeros(16, 16, device="meta")}), InvalidInputError),
        "proj_l.weight is on meta, the values on cpu; move them together",
    ),
    ({}, Place(grid=(4, 4, 5)), InvalidInputError, "has 64 tokens and its place 80"),
    (
        *({}, Place(grid=(4, 4, 3), text=(0, 16), valid_text=(0, 3), tensors=learned()), InvalidInputError),
        r"valid_text=\(0, 3\) of text=\(0, 16\) leaves padding, .* cut the padding off",
    ),
    ({"topk_ratio": 0.0}, at(Place(grid=(4, 4, 4))), ConfigError, "topk_ratio=0.0 keeps no key block; give a share"),
    ({"feature_map": "gelu"}, at(Place(grid=(4, 4, 4))), ConfigError, "feature_map"),
]


@pytest.mark.parametrize(("options", "place", "error", "message"), WRONG)
def test_wrong_places_and_options(options: dict[str, Any], place: Place, error: type[Exception], message: str) -> None:
    configure(**options)
    with pytest.raises(error, match=message):
        polyattn.attention(*tensors(64), backend=NAME, place=place)


def test_a_scale_is_refused() -> None:
    """The weights were trained with D^-0.5, of which the linear branch knows nothing."""
    with pytest.raises(UnsupportedRequestError, match="scale"):
        polyattn.attention(*tensors(64), backend=NAME, place=at(Place(grid=(4, 4, 4))), scale=0.1)


def test_two_branches_do_not_mix() -> None:
    """Nothing is kept from call to call: what a branch gives does not depend on what was asked before."""
    place = PLACES["ragged"]
    assert place.tokens is not None
    first = tensors(place.tokens)
    second = [t.flip(1) for t in first]
    found = {}
    for order in (("cond", "uncond"), ("uncond", "cond")):
        for branch in order:
            given = first if branch == "cond" else second
            out = polyattn.attention(*given, backend=NAME, place=at(place, branch=branch))
            assert torch.equal(found.setdefault(branch, out), out)
    assert not torch.equal(*found.values())


def test_loops_are_over_all_blocks() -> None:
    """What the loops above say is more than one set: a map that is the same for all rows would pass by chance."""
    q, k, _ = tensors(512)
    rows = list(itertools.chain.from_iterable(itertools.chain.from_iterable(chosen_by_loop(q, k, 0.4))))
    assert len({frozenset(row) for row in rows}) > 5
