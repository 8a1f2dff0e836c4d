"""Two thousand requests that arrive, are cancelled, forked, preempted and evicted with few pages: nothing leaks, and
every output is what its request says when it runs alone."""

from __future__ import annotations

import random

import pytest
import torch

from polyattn.serving.engine import Engine, EngineConfig, Output, SamplingParams, Speculative
from polyattn.serving.engine.sampling import distributions, uniform
from polyattn.serving.kv_cache.pool import KVCacheConfig

from .toy_model import VOCAB, ToyRunner

NEAR = 1e-4


def matches_solo(model: ToyRunner, output: Output, params: SamplingParams, start: int = 0) -> bool:
    """Whether each token follows from those before it, by the model in one piece. By induction this is the solo run.

    Args:
        start: tokens that a fork took from its parent.
    """
    if len(output.token_ids) <= start:
        return output.finish_reason == "cancelled"
    tokens = output.prompt + output.token_ids
    logits = model.dense(tokens[:-1])[len(output.prompt) - 1 :]
    for n in range(start, len(output.token_ids)):
        token, best = output.token_ids[n], logits[n].topk(2).values
        if params.greedy:
            if token != int(logits[n].argmax()) and float(best[0] - best[1]) > NEAR:
                return False
            continue
        cumulated = distributions(logits[n : n + 1], [params])[0].cumsum(0)
        point = uniform(params, output.number, len(output.prompt) + n)
        low = float(cumulated[token - 1]) if token else 0.0
        if not low - NEAR <= point <= float(cumulated[token]) + NEAR:
            return False
    return True


def work_through(engine: Engine, model: ToyRunner, count: int, seed: int, *, sampled: bool) -> dict[str, int]:
    """`count` requests with everything that can happen to them; how often it did."""
    chance = random.Random(seed)
    stems = [[chance.randrange(VOCAB) for _ in range(chance.randrange(4, 30))] for _ in range(6)]
    params: dict[int, SamplingParams] = {}
    start: dict[int, int] = {}
    seen = dict.fromkeys(("added", "cancelled", "forked", "preempted", "shared", "finished", "stopped"), 0)

    def finished(outputs: list[Output]) -> None:
        for output in outputs:
            own = params.pop(output.id)
            seen["finished"] += output.finish_reason != "cancelled"
            seen["stopped"] += output.finish_reason == "stop"
            seen["preempted"] += output.preemptions
            seen["shared"] += output.cached_tokens > 0
            assert 1 <= len(output.token_ids) <= own.max_new_tokens or output.finish_reason == "cancelled"
            assert len(output.token_ids) == own.max_new_tokens or output.finish_reason != "length"
            assert matches_solo(model, output, own, start.pop(output.id, 0)), output

    while seen["added"] < count or engine.unfinished:
        for _ in range(chance.randrange(4) if seen["added"] < count and engine.unfinished < 60 else 0):
            stem = chance.choice(stems)
            prompt = stem[: chance.randrange(1, len(stem) + 1)] + [
                chance.randrange(VOCAB) for _ in range(chance.randrange(5))
            ]
            own = SamplingParams(
                max_new_tokens=chance.randrange(1, 16),
                temperature=chance.choice([0.0, 0.0, 1.0]) if sampled else 0.0,
                top_k=chance.choice([0, 5]),
                seed=chance.randrange(100),
                stop_token_ids=(chance.randrange(VOCAB),) if chance.random() < 0.3 else (),
            )
            ids = engine.add(
                prompt, own, n=chance.choice([1, 1, 1, 3]), namespace=chance.choice([None, None, "tenant"])
            )
            params.update(dict.fromkeys(ids, own))
            seen["added"] += len(ids)
        if params and chance.random() < 0.05:
            seen["cancelled"] += 1
            finished([engine.cancel(chance.choice(list(params)))])
        if params and chance.random() < 0.05:
            parent = chance.choice(list(params))
            made = len(engine.tokens_of(parent))
            own = SamplingParams(made + chance.randrange(1, 8), params[parent].temperature, seed=chance.randrange(100))
            child = engine.fork(parent, own)
            params[child], start[child] = own, made
            seen["forked"] += 1
        finished(engine.step())
        engine.check()
    return seen


def nothing_is_held(engine: Engine) -> None:
    memory = engine.memory
    assert memory.table.rows == []
    assert memory.prefixes is not None
    assert memory.prefixes.evictable == memory.prefixes.size
    memory.prefixes.clear()
    assert [a.free for a in memory.allocators] == [a.capacity for a in memory.allocators]
    engine.check()


@torch.no_grad()
def test_two_thousand_requests() -> None:
    model = ToyRunner()
    config = EngineConfig(
        KVCacheConfig(page_size=4),
        pages=44,
        max_requests=12,
        max_tokens=64,
        max_batch_tokens=40,
        backend="torch_native",
    )
    engine = Engine(model, config)
    seen = work_through(engine, model, 2000, seed=0, sampled=True)
    nothing_is_held(engine)
    print(seen)
    assert seen["finished"] + seen["cancelled"] == seen["added"] + seen["forked"]
    assert min(seen[what] for what in ("cancelled", "forked", "preempted", "shared", "stopped")) >= 50, seen


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("topk", [1, 2])
@torch.no_grad()
def test_drafts_under_the_same_load(topk: int) -> None:
    model = ToyRunner()
    spec = Speculative(ToyRunner(seed=1), steps=2, topk=topk)
    config = EngineConfig(
        KVCacheConfig(page_size=4), pages=26, max_requests=8, max_tokens=64, max_batch_tokens=40, speculative=spec,
        backend="torch_native",
    )  # fmt: skip
    engine = Engine(model, config)
    seen = work_through(engine, model, 100, seed=topk, sampled=False)
    nothing_is_held(engine)
    assert seen["finished"] + seen["cancelled"] == seen["added"] + seen["forked"]
    assert seen["preempted"] > 0
