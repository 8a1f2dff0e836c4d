"""From logits to tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

from polyattn.errors import InvalidInputError
from polyattn.serving.engine.sampling import SamplingParams, distributions, sample, uniform

LOGITS = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 100])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 1.0])
def test_distributions_are_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    warped, ids = LOGITS / temperature, torch.zeros(6, 1, dtype=torch.int64)
    if top_k:
        warped = transformers.TopKLogitsWarper(min(top_k, 40))(ids, warped)
    if top_p < 1:
        warped = transformers.TopPLogitsWarper(top_p)(ids, warped)
    assert torch.allclose(distributions(LOGITS, [params] * 6), warped.softmax(-1), atol=1e-6)


def test_each_row_has_its_own_rule() -> None:
    params = [SamplingParams(), SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=3.0)] * 2
    found = distributions(LOGITS, params)
    assert [(row > 0).sum().item() for row in found] == [1, 2, 40] * 2
    assert torch.allclose(found.sum(-1), torch.ones(6))
    assert found[0].argmax() == LOGITS[0].argmax()


def test_greedy_rows_beside_drawn_ones() -> None:
    params = [SamplingParams(), SamplingParams(temperature=1.0)] * 3
    drawn = sample(LOGITS, params, [0.7] * 6)
    assert torch.equal(drawn[::2], LOGITS[::2].argmax(-1))
    assert torch.equal(sample(LOGITS[::2], params[::2], [0.7] * 3), drawn[::2])


def test_draws_follow_the_distribution() -> None:
    params = SamplingParams(temperature=1.0, top_k=4)
    count = 4000
    drawn = sample(LOGITS[:1].expand(count, -1), [params] * count, [uniform(params, 0, n) for n in range(count)])
    found = torch.bincount(drawn, minlength=40) / count
    assert torch.allclose(found, distributions(LOGITS[:1], [params])[0], atol=0.03)
    assert (found > 0).sum() == 4


def test_a_draw_is_of_its_seed_sample_and_place() -> None:
    params, other = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=1)
    ways = [(params, 0, 0), (params, 1, 0), (params, 0, 1), (other, 0, 0)]
    assert len({uniform(*way) for way in ways}) == 4
    assert uniform(params, 0, 0) == uniform(SamplingParams(temperature=2.0, top_k=3), 0, 0)
    assert all(0 <= uniform(params, 0, place) < 1 for place in range(100))


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("max_new_tokens", 0, "1 or more"),
        ("temperature", -1.0, "0 .greedy. or more"),
        ("temperature", float("inf"), "0 .greedy. or more"),
        ("top_p", 0.0, "above 0, at most 1"),
        ("top_p", 1.5, "above 0, at most 1"),
        ("top_k", -1, "0 .off. or more"),
        ("top_k", 2.5, "0 .off. or more, a whole number"),
        ("max_new_tokens", 2.5, "1 or more, a whole number"),
        ("stop_token_ids", 5, "token ids, such as"),
        ("stop_token_ids", None, "token ids, such as"),
        ("temperature", "hot", "0 .greedy. or more"),
        ("top_p", None, "above 0, at most 1"),
        ("seed", [1], "a whole number"),
        ("stop_token_ids", ("x",), "token ids, such as"),
    ],
)
def test_values_out_of_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(
        InvalidInputError, match=f"{re.escape(f'{name}={value!r}')} of SamplingParams must be {allowed}"
    ):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_largest_number_has_no_token(number: float) -> None:
    logits = LOGITS.clone()
    logits[1:3] = number
    params = [SamplingParams(), SamplingParams(), *[SamplingParams(temperature=1.0)] * 4]
    drawn = sample(logits, params, [0.5] * 6)
    assert drawn[1:3].tolist() == [-1, -1]
    assert torch.equal(drawn[[0, 3, 4, 5]], sample(LOGITS, params, [0.5] * 6)[[0, 3, 4, 5]])
    masked = LOGITS.masked_fill(torch.arange(40) > 3, float("-inf"))
    assert sample(masked, params, [0.5] * 6).min() >= 0
