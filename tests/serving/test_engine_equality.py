"""The engine says what `model.generate` says, token for token, greedy and in fp32, whatever way it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams, Speculative
from polyattn.serving.kv_cache.pool import KVCacheConfig

from .models import SHAPES, prompt

NEW = 14
NEAR = 1e-4
"""Of two logits: closer ones may change places by rounding alone, and with them everything that follows."""

PROMPTS = [prompt(70, 1), prompt(33, 2), prompt(1, 3)]
# Longer than a page of 64, so that there is a whole page to share; 65 tokens and more behind it differ.
SHARED = [PROMPTS[0], PROMPTS[0][:66] + prompt(5, 4), PROMPTS[0] + prompt(9, 5)]

# gemma2 is served by the reference for its softcap, where nothing else is here, and that is said once per request.


@functools.cache
def model(shape: str, seed: int = 0) -> Any:
    return SHAPES[shape](seed=seed)


@functools.cache
def runner(shape: str, seed: int = 0) -> CausalLMRunner:
    return CausalLMRunner(model(shape, seed))


@functools.cache
def expected(shape: str, tokens: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """What `model.generate` says, and how far its first choice was from its second, at each place."""
    ids = torch.tensor([tokens])
    out = model(shape).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [logits[0].topk(2).values for logits in out.logits]
    return out.sequences[0, len(tokens) :].tolist(), [float(first - second) for first, second in best]


def agree(
    shape: str, prompts: Sequence[list[int]], outputs: Sequence[Any], note: Callable[[str, object], None]
) -> None:
    for tokens, output in zip(prompts, outputs, strict=True):
        ids, gaps = expected(shape, tuple(tokens))
        near = next((n for n, gap in enumerate(gaps) if gap < NEAR), NEW)
        if near < NEW:
            note("near_tie", f"{shape}: place {near} of prompt of {len(tokens)} tokens, gap {gaps[near]:.1e}")
        assert near > NEW // 2, "most of the text is compared"
        assert output.token_ids[:near] == ids[:near]
        assert len(output.token_ids) == NEW


def engine(shape: str, page_size: int, **more: Any) -> Engine:
    return Engine(runner(shape), EngineConfig(cache=KVCacheConfig(page_size=page_size), max_tokens=128, **more))


each = pytest.mark.parametrize("shape", list(SHAPES))
pages = pytest.mark.parametrize("page_size", [1, 16, 64])
GREEDY = SamplingParams(max_new_tokens=NEW)


@pytest.mark.slow(keep=9)
@each
@pages
def test_plain(shape: str, page_size: int, record_property: Callable[[str, object], None]) -> None:
    made = engine(shape, page_size)
    outputs = made.generate(PROMPTS, GREEDY)
    agree(shape, PROMPTS, outputs, record_property)
    made.check()
    assert all(output.cached_tokens == 0 for output in outputs)


@pytest.mark.slow(keep=8)
@each
@pages
def test_prefix_shared(shape: str, page_size: int, record_property: Callable[[str, object], None]) -> None:
    made = engine(shape, page_size)
    outputs = made.generate(SHARED[:1], GREEDY) + made.generate(SHARED[1:], GREEDY)
    agree(shape, SHARED, outputs, record_property)
    made.check()
    found = [output.cached_tokens for output in outputs]
    # The first 66 tokens are shared with the second, 70 with the third: whole pages of them are found.
    assert found == [0, 66 // page_size * page_size, 70 // page_size * page_size]


@pytest.mark.slow(keep=11)
@each
@pages
def test_chunked_prefill(shape: str, page_size: int, record_property: Callable[[str, object], None]) -> None:
    made = engine(shape, page_size, max_batch_tokens=13)
    outputs = made.generate(PROMPTS, GREEDY)
    agree(shape, PROMPTS, outputs, record_property)
    made.check()


@pytest.mark.slow(keep=2)
@each
@pages
def test_speculative_chain(shape: str, page_size: int, record_property: Callable[[str, object], None]) -> None:
    for draft in (runner(shape), runner(shape, seed=1)):  # one that is always right, and one that hardly ever is
        made = engine(shape, page_size, max_batch_tokens=48, speculative=Speculative(draft, steps=3))
        outputs = made.generate(PROMPTS, GREEDY)
        agree(shape, PROMPTS, outputs, record_property)
        made.check()
        assert all("verify" in output.backends for output in outputs)


@pytest.mark.slow(keep=2)
@each
@pages
def test_speculative_tree(shape: str, page_size: int, record_property: Callable[[str, object], None]) -> None:
    for draft in (runner(shape), runner(shape, seed=1)):
        spec = Speculative(draft, steps=2, topk=3, draft_tokens=8)
        made = engine(shape, page_size, max_batch_tokens=48, speculative=spec)
        outputs = made.generate(PROMPTS, GREEDY)
        agree(shape, PROMPTS, outputs, record_property)
        made.check()


def test_a_draft_that_is_always_right_saves_steps() -> None:
    steps = []
    for spec in (None, Speculative(runner("llama"), steps=4)):
        made = engine("llama", 16, speculative=spec)
        made.add(PROMPTS[1], GREEDY)
        count = 0
        while made.unfinished:
            made.step()
            count += 1
        steps.append(count)
    # One for the prompt, then 13 tokens by one, or by five at a time.
    assert steps == [NEW, 1 + 3]
