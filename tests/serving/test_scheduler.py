"""Who waits, in which order, and what is forgotten for whom."""

from __future__ import annotations

import itertools
import random

import torch

from polyattn.serving.engine import Engine, EngineConfig, SamplingParams
from polyattn.serving.engine.scheduler import Request, Scheduler
from polyattn.serving.kv_cache.pool import KVCacheConfig
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.memory import Memory

from .toy_model import VOCAB, ToyRunner

MODEL = ToyRunner()


class Counted(Request):
    """Knows how often anybody asked for its age."""

    asked = 0

    def __getattribute__(self, name):
        if name == "id":
            Counted.asked += 1
        return super().__getattribute__(name)


def scheduler() -> Scheduler:
    memory = Memory(MODEL, KVCacheConfig(page_size=4), pages=9, rows=2, max_tokens=32, step_tokens=8)
    return Scheduler(memory, 8, 0, lambda request: None)


def request(number: int) -> Request:
    return Counted(number, [1, 2], 2, SamplingParams(), itertools.count())


def test_requests_wait_by_age_whatever_order_they_come_in() -> None:
    line, numbers = scheduler(), list(range(50))
    random.Random(0).shuffle(numbers)
    made = {number: request(number) for number in numbers}
    for number in numbers:
        line.add(made[number])
    assert [one.id for one in line.waiting] == list(range(50))
    for number in numbers[:20]:
        line.remove(made[number])
    assert [one.id for one in line.waiting] == sorted(numbers[20:])


def test_a_place_in_a_long_line_is_found_without_walking_it() -> None:
    line, many = scheduler(), 2000
    Counted.asked = 0
    for number in range(many):
        line.add(request(2 * number + 1))
    assert Counted.asked <= 4 * many, "at the end"
    Counted.asked = 0
    for number in range(many):
        line.add(request(-number - 1))
    assert Counted.asked <= 5 * many, "in front"
    Counted.asked = 0
    line.add(middle := request(1000))
    line.remove(middle)
    assert Counted.asked <= 50


def prompt(start: int, length: int) -> list[int]:
    return [(start + 7 * place + place // VOCAB) % VOCAB for place in range(length)]


def cached(engine: Engine, tokens: list[int]) -> int:
    """How many of a prompt's tokens are in the prefix cache."""
    assert engine.memory.prefixes is not None
    match = engine.memory.prefixes.match(tokens)
    engine.memory.prefixes.release(match)
    return match.length


@torch.no_grad()
def test_who_cannot_start_is_tried_again_when_there_is_more() -> None:
    config = EngineConfig(KVCacheConfig(page_size=4), pages=31, max_requests=4, max_tokens=96, backend="torch_native")
    engine, tried = Engine(MODEL, config), []
    begin = engine.memory.begin
    engine.memory.begin = lambda tokens, namespace: tried.append(len(tokens)) or begin(tokens, namespace)
    long, short = (engine.add(prompt(start, 45), SamplingParams(max_new_tokens=n))[0] for start, n in ((1, 20), (2, 6)))
    engine.step()
    (waits,) = engine.add([*prompt(1, 40), *prompt(5, 36)], SamplingParams(max_new_tokens=1))
    tried.clear()
    found = {}
    for _ in range(5):
        found.update({output.id: output for output in engine.step()})
    assert list(found) == [short]
    assert tried == [76, 76], "in the first step, and when a page was out of the window of its sliding layer"
    found.update({output.id: output for output in engine.step()})
    assert found[waits].cached_tokens == 40, "it starts with the prefix of the one that still runs"
    assert not engine.tokens_of(long)[20:]
    engine.check()


@torch.no_grad()
def test_who_found_no_budget_left_starts_in_the_next_step() -> None:
    """What a step may compute comes anew: only pages that are wanting are wanting still."""
    config = EngineConfig(
        KVCacheConfig(page_size=16), max_tokens=96, max_batch_tokens=8, prefix_caching=False, backend="torch_native"
    )
    model = ToyRunner()
    model.layers = [AttentionLayer(i, 4, 2, 16) for i in (0, 1)]  # no sliding layer gives pages back meanwhile
    engine = Engine(model, config)
    engine.add(prompt(1, 8), SamplingParams(max_new_tokens=40))
    (short,) = engine.add(prompt(2, 3), SamplingParams(max_new_tokens=3))
    done = [output.id for _ in range(4) for output in engine.step()]
    assert done == [short]


@torch.no_grad()
def test_nothing_is_forgotten_for_a_request_that_cannot_start() -> None:
    config = EngineConfig(KVCacheConfig(page_size=4), pages=41, max_requests=4, max_tokens=96, backend="torch_native")
    engine = Engine(MODEL, config)
    known = [prompt(start, 17) for start in range(3)]
    engine.generate(known, SamplingParams(max_new_tokens=1))
    running = [engine.add(prompt(start, 48), SamplingParams(max_new_tokens=6))[0] for start in (11, 12)]
    engine.step()
    # 24 of 40 pages are in use and 12 are cached: 18 cannot be had.
    (waits,) = engine.add(prompt(20, 70), SamplingParams(max_new_tokens=2))
    for _ in range(4):
        engine.step()
        assert all(map(engine.tokens_of, running))
        assert not engine.tokens_of(waits)
        assert [cached(engine, tokens) for tokens in known] == [16, 16, 16]
        engine.check()
    outputs = {}
    while engine.unfinished:
        outputs.update({output.id: output for output in engine.step()})
        engine.check()
    assert len(outputs[waits].token_ids) == 2, "it starts when the others are through"
    assert sum(cached(engine, tokens) for tokens in known) < 48, "and takes what it needs then"
    assert {output.preemptions for output in outputs.values()} == {0}
