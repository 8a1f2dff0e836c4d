"""An engine on a thread of its own: requests come and go while it steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from polyattn.errors import BusyError, InvalidInputError
from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams
from polyattn.serving.engine.loop import EngineLoop, Update
from polyattn.serving.kv_cache.pool import KVCacheConfig


@pytest.fixture(scope="module")
def runner() -> CausalLMRunner:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=2, initializer_range=0.4, **sizes)  # type: ignore[arg-type]
    return CausalLMRunner(transformers.LlamaForCausalLM(config).eval())


class Kept:
    """What was told of a request, and when it ended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.last: Update | None = None
        self.some, self.end = threading.Event(), threading.Event()

    def __call__(self, update: Update) -> None:
        assert self.last is None, "something was told after the end"
        self.tokens += update.tokens
        self.some.set()
        if update.output is not None or update.error is not None:
            self.last = update
            self.end.set()

    def wait(self) -> Update:
        assert self.end.wait(600)
        assert self.last is not None
        return self.last


class Gate:
    """Lets an engine step only when it is opened, or makes its steps fail."""

    def __init__(self, engine: Engine) -> None:
        self.open, self.error = threading.Event(), None
        self.open.set()
        self._forward = engine.memory.forward
        engine.memory.forward = self  # type: ignore[method-assign]
        self.error: Exception | None = None

    def __call__(self, *given: Any, **options: Any) -> Any:
        assert self.open.wait(600)
        if self.error is not None:
            raise self.error
        return self._forward(*given, **options)


Rig = tuple[Engine, EngineLoop, Gate]


@pytest.fixture(params=[False, True], ids=["told at once", "told beside the next step"])
def rig(runner: CausalLMRunner, request: pytest.FixtureRequest) -> Iterator[Rig]:
    engine = Engine(runner, EngineConfig(cache=KVCacheConfig(page_size=4), max_requests=2, max_tokens=64))
    gate, loop = Gate(engine), EngineLoop(engine, waiting=2, beside=request.param)
    loop.start()
    yield engine, loop, gate
    gate.error = None
    gate.open.set()
    loop.close()
    engine.check()
    assert engine.unfinished == loop.unfinished == 0


def test_requests_say_what_generate_says(rig: Rig, runner: CausalLMRunner) -> None:
    engine, loop, _ = rig
    kept = [Kept() for _ in range(4)]
    for number, one in enumerate(kept):
        loop.submit([number + 1, 7], SamplingParams(6 + number), one)
    outputs = [one.wait().output for one in kept]
    alone = Engine(runner, engine.config)
    for number, (one, output) in enumerate(zip(kept, outputs, strict=True)):
        (want,) = alone.generate([[number + 1, 7]], SamplingParams(6 + number))
        assert output is not None
        assert one.tokens == output.token_ids == want.token_ids
    assert (loop.counts.generated_tokens, loop.counts.prompt_tokens) == (6 + 7 + 8 + 9, 8)
    assert loop.counts.ended == {"length": 4}


def test_tokens_are_told_when_the_next_step_is_on_its_way_and_the_first_at_once(runner: CausalLMRunner) -> None:
    engine = Engine(runner, EngineConfig(cache=KVCacheConfig(page_size=4), max_requests=2, max_tokens=64))
    loop, seen = EngineLoop(engine, beside=True), []
    forward = engine.memory.forward

    def launched(*given: Any, **options: Any) -> Any:
        seen.append("launched")
        return forward(*given, **options)

    engine.memory.forward = launched  # type: ignore[method-assign]
    done = threading.Event()

    def tell(update: Update) -> None:
        seen.append(len(update.tokens))
        if update.output is not None:
            done.set()

    loop.start()
    loop.submit([1, 7], SamplingParams(4), tell)
    assert done.wait(600)
    loop.close()
    # Prompt, its token; then each token after the launch of the step behind it, and the last with no step behind it.
    assert seen == ["launched", 1, "launched", "launched", 1, "launched", 1, 1]


def test_a_cancelled_request_gives_its_pages_back(rig: Rig) -> None:
    engine, loop, gate = rig
    gone, stays = Kept(), Kept()
    ticket = loop.submit([1], SamplingParams(60), gone)
    assert gone.some.wait(600)
    gate.open.clear()
    loop.submit([2], SamplingParams(3), stays)
    loop.cancel(ticket)
    gate.open.set()
    stays.wait()
    assert (engine.unfinished, loop.unfinished, gone.last) == (0, 0, None)
    assert loop.counts.ended == {"cancelled": 1, "length": 1}
    loop.cancel(ticket)  # once more says nothing


def test_one_that_is_cancelled_before_it_was_taken_in_is_never_run(rig: Rig) -> None:
    _, loop, gate = rig
    gate.open.clear()
    first, never = Kept(), Kept()
    loop.submit([1], SamplingParams(2), first)
    loop.cancel(loop.submit([2], SamplingParams(9), never))
    gate.open.set()
    first.wait()
    loop.close()
    assert (never.tokens, never.last, loop.counts.prompt_tokens) == ([], None, 1)


def test_more_than_may_wait_are_refused_and_nothing_is_taken(rig: Rig) -> None:
    _, loop, gate = rig
    gate.open.clear()
    kept = [Kept() for _ in range(4)]
    for one in kept:
        loop.submit([1], SamplingParams(2), one)
    with pytest.raises(BusyError, match=r"4 requests run or wait, and no more than 4 may; ask again later") as caught:
        loop.submit([1], SamplingParams(2), Kept())
    assert caught.value.passing
    gate.open.set()
    for one in kept:
        one.wait()
    loop.submit([1], SamplingParams(2), again := Kept())
    again.wait()


def test_a_step_that_fails_ends_its_requests_and_no_others(rig: Rig) -> None:
    _, loop, gate = rig
    gate.open.clear()
    kept = [Kept() for _ in range(3)]
    for number, one in enumerate(kept):
        loop.submit([number + 1], SamplingParams(4), one)
    gate.error = MemoryError("no room")
    gate.open.set()
    failed = [one.wait() for one in kept]
    assert {str(update.error) for update in failed} == {"no room"}
    assert loop.failures >= 2, "two requests run at a time: the third failed in a step of its own"
    gate.error = None
    loop.submit([1], SamplingParams(4), fine := Kept())
    output = fine.wait().output
    assert output is not None
    assert (loop.failures, str(loop.failure)) == (0, "no room")
    assert loop.alive


def test_close_lets_requests_end_and_takes_no_more(rig: Rig) -> None:
    _, loop, gate = rig
    gate.open.clear()
    loop.submit([1], SamplingParams(5), kept := Kept())
    closing = threading.Thread(target=loop.close)
    closing.start()
    while loop.alive:
        pass
    with pytest.raises(BusyError, match="takes no more requests: it is shutting down; ask another server") as caught:
        loop.submit([1], SamplingParams(2), Kept())
    assert not caught.value.passing
    gate.open.set()
    closing.join()
    assert len(kept.tokens) == 5


def test_close_cancels_what_takes_too_long(rig: Rig) -> None:
    engine, loop, _ = rig
    loop.submit([1], SamplingParams(60), kept := Kept())
    assert kept.some.wait(600)
    loop.close(0)
    assert (engine.unfinished, loop.counts.ended) in ((0, {"cancelled": 1}), (0, {"length": 1}))


def test_what_could_never_run_is_refused_at_once(rig: Rig) -> None:
    _, loop, _ = rig
    with pytest.raises(InvalidInputError, match="a request may have 64 here"):
        loop.submit([1], SamplingParams(64), Kept())
    with pytest.raises(InvalidInputError, match="token 99 of the prompt is not in the vocabulary"):
        loop.submit([99], SamplingParams(1), Kept())
