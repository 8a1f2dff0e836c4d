"""What `Engine` promises, on the toy model: order, samples, forks, cancelling, preemption, graphs, refusals."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from polyattn.errors import (
    BackendUnavailableError,
    GraphError,
    InternalError,
    InvalidInputError,
    UnsupportedRequestError,
)
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams, Speculative
from polyattn.serving.engine.sampling import distributions
from polyattn.serving.graphs.graphs import FakeGraph
from polyattn.serving.kv_cache.pool import KVCacheConfig
from polyattn.serving.memory import _in_shared_layout
from polyattn.serving.step.batch import ForwardMode

from .toy_model import VOCAB, WINDOW, ToyRunner

MODEL = ToyRunner()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def engine(**more: Any) -> Engine:
    config: dict[str, Any] = {"cache": KVCacheConfig(page_size=4), "max_tokens": 64, "backend": "torch_native", **more}
    return Engine(config.pop("model", MODEL), EngineConfig(**config))


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(MODEL.dense(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def params(count: int = 6, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, **more)


@pytest.mark.parametrize("pages", [2, 5, 9, 99])
def test_the_longest_request_is_the_last_that_is_taken(pages: int) -> None:
    made = engine(pages=pages, prefix_caching=False)
    assert made.longest == min(made.max_tokens, (pages - 1) * made.config.cache.page_size)
    made.check_request([1], SamplingParams(made.longest - 1))
    with pytest.raises(InvalidInputError):
        made.check_request([1], SamplingParams(made.longest))


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    prompts = [PROMPT[:n] for n in (9, 1, 4)]
    outputs = engine().generate(prompts, [params(n) for n in (5, 2, 8)])
    assert [output.prompt for output in outputs] == prompts
    assert [output.token_ids for output in outputs] == [greedy(p, n) for p, n in zip(prompts, (5, 2, 8), strict=True)]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert outputs[0].backends == {"prefill": "torch_native", "decode": "torch_native"}


def test_a_stop_token_ends_an_output_and_is_its_last() -> None:
    expected = greedy(PROMPT, 8)
    (output,) = engine().generate([PROMPT], params(8, stop_token_ids=(expected[3],)))
    assert output.token_ids == expected[: expected.index(expected[3]) + 1]
    assert output.finish_reason == "stop"


def test_progress_counts_every_token_once() -> None:
    told: list[int] = []
    engine().generate([PROMPT, PROMPT[:2]], [params(5), params(3)], progress=told.append)
    assert sum(told) == 8


def test_generate_keeps_the_outputs_of_other_requests_for_the_next_step() -> None:
    made = engine()
    (other,) = made.add(PROMPT[:3], params(2))
    made.generate([PROMPT], params(6))
    assert [output.id for output in made.step()] == [other]


def test_samples_share_the_prompt_and_differ() -> None:
    made = engine()
    ids = made.add(PROMPT, params(5, temperature=2.0, seed=1), n=4)
    shared = made.step()
    pages = [made.memory.table.pages(row, 0)[:2] for row in made.memory.table.rows]
    assert shared == []
    assert len(pages) == 4
    assert all(page == pages[0] for page in pages)
    outputs = {}
    while made.unfinished:
        outputs.update({output.id: output for output in made.step()})
        made.check()
    assert sorted(outputs) == ids
    assert [outputs[i].number for i in ids] == [0, 1, 2, 3]
    assert len({tuple(outputs[i].token_ids) for i in ids}) > 1


def test_samples_without_a_row_wait_and_find_the_prompt_cached() -> None:
    made = engine(max_requests=2)
    ids = made.add(PROMPT, params(3), n=4)
    outputs = {}
    while made.unfinished:
        outputs.update({output.id: output for output in made.step()})
    assert [outputs[i].token_ids for i in ids] == [greedy(PROMPT, 3)] * 4
    assert outputs[ids[3]].cached_tokens == 8


def test_a_draw_depends_on_its_request_alone() -> None:
    own = params(8, temperature=1.5, seed=11)
    (alone,) = engine().generate([PROMPT], own)
    among = engine(max_batch_tokens=5).generate([PROMPT[:4], PROMPT, [7]], own)
    assert among[1].token_ids == alone.token_ids


def test_a_fork_goes_on_from_its_parent() -> None:
    made = engine()
    (parent,) = made.add(PROMPT, params(8))
    for _ in range(3):
        made.step()
    taken = made.tokens_of(parent)
    child = made.fork(parent, params(6))
    assert made.tokens_of(child) == taken
    outputs = {}
    while made.unfinished:
        outputs.update({output.id: output for output in made.step()})
        made.check()
    assert outputs[parent].token_ids == greedy(PROMPT, 8)
    assert outputs[child].token_ids == greedy(PROMPT, 6)
    assert outputs[child].cached_tokens == len(PROMPT) + len(taken) - 1


def test_a_fork_of_a_waiting_request_waits_too() -> None:
    made = engine()
    (parent,) = made.add(PROMPT, params(3))
    child = made.fork(parent)
    outputs = {}
    while made.unfinished:
        outputs.update({output.id: output for output in made.step()})
    assert outputs[child].token_ids == outputs[parent].token_ids == greedy(PROMPT, 3)


def test_cancelling_gives_what_there_is() -> None:
    made = engine()
    running, waiting = made.add(PROMPT, params(8))[0], 0
    made.step()
    made.step()
    (waiting,) = made.add(PROMPT, params(8))
    output = made.cancel(running)
    assert (output.finish_reason, output.token_ids) == ("cancelled", greedy(PROMPT, 2))
    assert made.cancel(waiting).token_ids == []
    assert made.unfinished == 0
    assert made.step() == []
    assert made.memory.table.rows == []
    made.check()


def test_cancelling_a_sample_leaves_the_others() -> None:
    made = engine()
    first, second, third = made.add(PROMPT, params(3), n=3)
    made.cancel(second)
    made.cancel(first)
    outputs = []
    while made.unfinished:
        outputs += made.step()
    assert [(output.id, output.token_ids) for output in outputs] == [(third, greedy(PROMPT, 3))]


def test_the_youngest_gives_way_and_loses_nothing() -> None:
    made = engine(pages=9, prefix_caching=False)  # 32 tokens; two requests of 21
    ids = [made.add(prompt, params(12))[0] for prompt in (PROMPT, PROMPT[::-1])]
    outputs = {}
    while made.unfinished:
        outputs.update({output.id: output for output in made.step()})
        made.check()
    assert [outputs[i].preemptions for i in ids] == [0, 1]
    assert [outputs[i].token_ids for i in ids] == [greedy(PROMPT, 12), greedy(PROMPT[::-1], 12)]


def test_one_that_is_alone_goes_on_with_the_cached_pages_it_had_twice() -> None:
    """Two that begin alike at the same time, and room for one."""
    prompts = [[19, 8, 23, 11], [19, 8, 23, 11], [19, 8]]
    made = engine(cache=KVCacheConfig(page_size=2), pages=7, max_requests=2)
    outputs = made.generate(prompts, params(8))
    assert [output.token_ids for output in outputs] == [greedy(prompt, 8) for prompt in prompts]
    made.check()


def test_slots_that_nobody_wrote_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt takes pages from a younger fork that was to decode in the same step."""
    made = engine(pages=5, max_batch_tokens=5)
    (parent,) = made.add(PROMPT[:3], params(12))
    for _ in range(4):
        made.step()
    made.add(PROMPT, params(2))
    child = made.fork(parent)
    ended: list[int] = []
    end = made.memory.end

    def spied(row: int, tokens: Any, namespace: Any) -> None:
        ended.append(made.memory.table.length(row))
        end(row, tokens, namespace)

    made.step()  # the fork is at 7 tokens; the next one would fill its second page
    monkeypatch.setattr(made.memory, "end", spied)
    made.step()
    assert ended == [7]
    assert made.tokens_of(child) == greedy(PROMPT[:3], 5)
    outputs = {}
    while made.unfinished:
        outputs.update({output.id: output for output in made.step()})
        made.check()
    assert outputs[child].token_ids == outputs[parent].token_ids == greedy(PROMPT[:3], 12)
    assert outputs[child].preemptions == 1


def test_a_long_prompt_delays_nobody() -> None:
    made = engine(max_batch_tokens=6)
    (short,) = made.add(PROMPT[:2], params(8))
    made.step()
    made.add(PROMPT * 4, params(2))
    for tokens in range(2, 7):
        made.step()
        assert len(made.tokens_of(short)) == tokens


def test_prefixes_are_shared_within_a_namespace_only() -> None:
    made = engine()
    found = []
    for namespace in (None, None, "tenant"):
        made.add(PROMPT, params(1), namespace=namespace)
        found += [output.cached_tokens for output in made.step()]
    assert found == [0, 8, 0]


def test_steps_are_replayed_from_graphs() -> None:
    made = engine(backend="torch_sdpa", graphs=FakeGraph, max_requests=2)
    outputs = made.generate([PROMPT, PROMPT[:3]], params(5))
    assert [output.token_ids for output in outputs] == [greedy(PROMPT, 5), greedy(PROMPT[:3], 5)]
    assert made.memory.graphs is not None
    assert made.memory.graphs.recorded == ((ForwardMode.DECODE, 2),)
    with torch.profiler.profile() as found:
        made.generate([PROMPT], params(3))
    names = [event.name for event in found.events()]
    # The prompt is cached but for its last token.
    assert names.count("polyattn.serving decode replayed torch_sdpa@cpu") == 3
    assert engine().memory.graphs is None, "a CPU has none"
    assert engine(backend="torch_sdpa", graphs=False).memory.graphs is None


def test_what_cannot_be_recorded_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch_native reads lengths on the host.
    with pytest.raises(GraphError, match="cannot be recorded"):
        engine(graphs=FakeGraph).generate([PROMPT], params(3))
    monkeypatch.setattr("polyattn.serving.memory.graphs_of", lambda device: FakeGraph)
    made = engine()
    with pytest.warns(RuntimeWarning, match="run eagerly, because the step cannot be recorded"):
        (output,) = made.generate([PROMPT], params(5))
    assert output.token_ids == greedy(PROMPT, 5)
    assert made.memory.graphs is None
    made.check()


def test_a_backend_that_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, max_bs: int, max_num_tokens: int) -> None:
        raise UnsupportedRequestError("--decode-attention-backend cannot be recorded")

    monkeypatch.setattr("polyattn.serving.attention.backend.AttentionBackend.init_cuda_graph_state", refuse)
    with pytest.raises(UnsupportedRequestError, match="cannot be recorded"):
        engine(graphs=FakeGraph)
    monkeypatch.setattr("polyattn.serving.memory.graphs_of", lambda device: FakeGraph)
    with pytest.warns(RuntimeWarning, match="run eagerly, because --decode-attention-backend cannot be recorded"):
        assert engine().memory.graphs is None


def test_drafts_are_verified_from_graphs() -> None:
    spec = Speculative(ToyRunner(seed=1), steps=2)
    made = engine(backend="torch_sdpa", graphs=FakeGraph, max_requests=1, speculative=spec)
    (output,) = made.generate([PROMPT], params(6))
    assert output.token_ids == greedy(PROMPT, 6)
    assert made.memory.graphs is not None
    assert made.memory.graphs.recorded == ((ForwardMode.TARGET_VERIFY, 1),)


@pytest.mark.parametrize("topk", [1, 3])
def test_sampled_drafts_are_drawn_again_by_the_seed(topk: int) -> None:
    def run(seed: int) -> list[int]:
        spec = Speculative(ToyRunner(seed=1), steps=2, topk=topk)
        made = engine(speculative=spec)
        both = made.generate([PROMPT, PROMPT[:4]], [params(8, temperature=4.0, seed=seed), params(8)])
        assert both[1].token_ids == greedy(PROMPT[:4], 8), "a greedy request beside it stays greedy"
        return both[0].token_ids

    assert run(1) == run(1) != run(2)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("topk", [0, 1, 3])
def test_a_draw_is_of_its_place_with_drafts_and_without(topk: int) -> None:
    """One seed says one text: with drafts or none, alone or preempted for others, in large steps or small ones."""
    prompts = [PROMPT, PROMPT[:4], [7], PROMPT[::-1], PROMPT[3:], [1, 2]]
    own = [params(12, temperature=3.0, seed=seed) for seed in range(len(prompts))]
    plain = [output.token_ids for output in engine(max_requests=8).generate(prompts, own)]
    spec = Speculative(ToyRunner(seed=1), steps=2, topk=topk) if topk else None
    roomy = engine(max_requests=8, speculative=spec).generate(prompts, own)
    small = {"max_requests": 4, "pages": 14, "max_batch_tokens": 21, "max_tokens": 24}
    tight = engine(speculative=spec, **small).generate(prompts, own)
    assert [output.token_ids for output in roomy] == plain
    assert [output.token_ids for output in tight] == plain
    assert sum(output.preemptions for output in tight)
    assert bool(topk) == any("verify" in output.backends for output in tight)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("topk", [1, 2])
def test_drafts_do_not_change_what_is_drawn(topk: int) -> None:
    """Two tokens drawn from two each: the first after the prompt, the second by accepting drafts."""
    count, own = 800, {"temperature": 6.0, "top_k": 2}
    made = engine(speculative=Speculative(ToyRunner(seed=1), steps=1, topk=topk), max_requests=32)
    outputs = made.generate([PROMPT] * count, [params(2, seed=seed, **own) for seed in range(count)])
    found = collections.Counter(tuple(output.token_ids) for output in outputs)
    first = distributions(MODEL.dense(PROMPT)[-1:], [params(**own)])[0]
    for token in first.nonzero()[:, 0].tolist():
        second = distributions(MODEL.dense([*PROMPT, token])[-1:], [params(**own)])[0]
        for following in second.nonzero()[:, 0].tolist():
            expected = float(first[token] * second[following])
            assert expected > 0.05, "each of the four pairs is drawn often"
            assert abs(found.pop((token, following)) / count - expected) < 0.06
    assert not found


def test_a_stop_token_among_accepted_drafts_ends_the_output() -> None:
    expected = greedy(PROMPT, 8)
    made = engine(speculative=Speculative(MODEL, steps=4))
    (output,) = made.generate([PROMPT], params(8, stop_token_ids=(expected[3],)))
    assert output.token_ids == expected[: expected.index(expected[3]) + 1]
    made.check()


def test_the_layout_is_the_one_that_the_phases_share(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def negotiate(requests: Any, *, backends: Any) -> tuple[str, tuple[str, ...]]:
        asked.append([(request.phase, request.window, name) for request, name in zip(requests, backends, strict=True)])
        return "HND", ()

    assert engine().memory.pool.config.layout == "NHD"
    monkeypatch.setattr("polyattn.serving.memory.negotiate_layout", negotiate)
    made = engine(backend=None, decode_backend="torch_native")
    assert made.memory.pool.config.layout == "HND"
    phases = (("extend", None), ("decode", "torch_native"))
    assert asked == [[(phase, (window, -1), name) for window in (-1, WINDOW) for phase, name in phases]]
    assert made.generate([PROMPT], params(5))[0].token_ids == greedy(PROMPT, 5)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
def test_narrow_caches_run(dtype: str) -> None:
    made = engine(cache=KVCacheConfig(dtype, page_size=4), backend=None)
    outputs = made.generate([PROMPT, PROMPT[:3] + PROMPT], params(6))
    assert [len(output.token_ids) for output in outputs] == [6, 6]
    assert made.memory.pool.cache(0).kv_dtype == dtype
    made.check()


def test_a_mixed_step_in_two_parts() -> None:
    """With a backend for each phase, rows that decode and rows that prefill are attended apart in one pass."""
    made = engine(backend=None, prefill_backend="torch_sdpa", decode_backend="torch_native", max_batch_tokens=6)
    prompts = [PROMPT[:2], PROMPT * 2, PROMPT[::-1]]
    outputs = made.generate(prompts, params(8))
    assert [output.token_ids for output in outputs] == [greedy(prompt, 8) for prompt in prompts]
    assert outputs[1].backends == {"prefill": "torch_sdpa", "decode": "torch_native"}


# Steps that fail ------------------------------------------------------------------------------------------------------


class Faulty(ToyRunner):
    """Fails in its `left`-th pass from now, between its layers: keys of the first one are written."""

    left = 0

    def _run(self, ids: Any, positions: Any, attend: Any) -> Any:
        def failing(layer: Any, *qkv: Any) -> Any:
            if layer.layer_id and self.left == 1:
                self.left = 0
                raise KeyboardInterrupt
            return attend(layer, *qkv)

        self.left, done = max(self.left, 0), self.left > 1
        out = super()._run(ids, positions, failing)
        self.left -= done
        return out


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("drafts", [None, "of the target", "of the draft model"])
def test_a_failed_step_is_as_if_it_had_not_been(drafts: str | None, at: int) -> None:
    faulty = Faulty()
    more: dict[str, Any] = {"model": faulty}
    if drafts:
        draft = faulty if drafts == "of the draft model" else MODEL
        more = {"model": MODEL if draft is faulty else faulty, "speculative": Speculative(draft, steps=2, topk=2)}
    made = engine(max_batch_tokens=32, **more)
    prompts = {made.add(prompt, params(8))[0]: prompt for prompt in (PROMPT, PROMPT[:6], PROMPT[:2])}
    faulty.left, outputs, failed = at, {}, 0
    while made.unfinished:
        try:
            outputs.update({output.id: output for output in made.step()})
        except KeyboardInterrupt:
            failed += 1
        made.check()
    assert failed == 1
    assert {i: output.token_ids for i, output in outputs.items()} == {i: greedy(p, 8) for i, p in prompts.items()}
    if made._drafter is not None:
        assert made._drafter.memory.table.rows == []


def test_what_a_failed_step_may_not_have_written_is_not_shared() -> None:
    faulty = Faulty()
    made = engine(model=faulty)
    (request,) = made.add(PROMPT, params(3))
    faulty.left = 1
    with pytest.raises(KeyboardInterrupt):
        made.step()
    assert made.cancel(request).token_ids == []
    made.check()
    (output,) = made.generate([[*PROMPT, 1]], params(6))
    assert output.cached_tokens == 0
    assert output.token_ids == greedy([*PROMPT, 1], 6)


def test_samples_that_were_forked_in_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    ids = made.add(PROMPT, params(3), n=3)
    with monkeypatch.context() as patch:
        patch.setattr("polyattn.serving.engine.engine.sample", None)
        with pytest.raises(TypeError):
            made.step()
    made.check()
    outputs = {}
    while made.unfinished:
        outputs.update({output.id: output for output in made.step()})
    assert [outputs[i].token_ids for i in ids] == [greedy(PROMPT, 3)] * 3


def test_a_row_that_finds_no_prefix_is_given_back() -> None:
    made = engine()
    with pytest.raises(InvalidInputError, match="namespace is a list"):
        made.memory.begin(PROMPT, [])  # type: ignore[arg-type]
    assert made.memory.table.rows == []


def test_generate_leaves_nothing_behind_when_a_prompt_is_refused() -> None:
    made = engine()
    (other,) = made.add(PROMPT[:3], params(2))
    with pytest.raises(InvalidInputError, match="token 999"):
        made.generate([PROMPT, [999]], params(2))
    assert made.unfinished == 1
    assert made.tokens_of(other) == []


def test_generate_leaves_nothing_behind_when_a_step_fails() -> None:
    faulty = Faulty()
    made = engine(model=faulty)
    (other,) = made.add(PROMPT[:3], params(2))
    faulty.left = 3
    with pytest.raises(KeyboardInterrupt):
        made.generate([PROMPT], params(6))
    assert made.unfinished == 0
    made.check()
    assert [(output.id, output.token_ids) for output in made.step()] == [(other, greedy(PROMPT[:3], 2))]


@pytest.mark.parametrize("positions", [(24, 256), (256, 12), (24, 24)])
def test_no_draft_is_made_beyond_the_positions_of_a_model(positions: tuple[int, int]) -> None:
    target, draft = (ToyRunner(seed, count) for seed, count in zip((0, 1), positions, strict=True))
    made = engine(model=target, max_tokens=24, speculative=Speculative(draft, steps=4))
    (output,) = made.generate([PROMPT[:5]], params(19))
    tokens = PROMPT[:5]
    for _ in range(19):
        tokens = [*tokens, int(target.dense(tokens)[-1].argmax())]
    assert output.token_ids == tokens[5:]
    assert {"verify", "decode"} <= output.backends.keys()


@pytest.mark.parametrize("drafts", [False, True])
def test_new_weights_make_everything_anew(drafts: bool) -> None:
    """After `forget_prefixes` nothing of the old weights is read: not by those who run, wait or come later."""
    model, new = ToyRunner(), ToyRunner(seed=5)
    spec = Speculative(model, steps=2) if drafts else None
    made = engine(model=model, max_requests=3, max_batch_tokens=16, speculative=spec)
    made.generate([PROMPT], params(2))
    ids = [made.add(prompt, params(8), n=n) for prompt, n in ((PROMPT, 2), (PROMPT[::-1], 1), ([7, 8] * 15, 1))]
    for _ in range(3):
        made.step()
    assert made.memory.table.rows
    tokens = {i: made.tokens_of(i) for group in ids for i in group}
    assert any(tokens.values())
    assert not all(tokens.values()), "one is in its prefill, or waits"
    for name in ("embedding", "places", "inputs", "head"):
        setattr(model, name, getattr(new, name))
    made.forget_prefixes()
    made.check()
    assert made.memory.table.rows == []
    assert {i: made.tokens_of(i) for i in tokens} == tokens
    late = made.add(PROMPT, params(4))[0]
    outputs = {}
    while made.unfinished:
        outputs.update({output.id: output for output in made.step()})
        made.check()
    assert sorted(outputs) == sorted([*tokens, late])
    for i, output in outputs.items():
        for n in range(len(tokens.get(i, [])), len(output.token_ids)):
            text = output.prompt + output.token_ids[:n]
            assert output.token_ids[n] == int(new.dense(text)[-1].argmax())


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, own, more, said",
    [
        ([], {}, {}, "0 prompt tokens"),
        ([1], {}, {"n": 0}, "n=0 samples"),
        ([1], {}, {"n": "2"}, "n='2' samples"),
        (None, {}, {}, "the prompt is a NoneType; needed is a list of token ids"),
        ("once", {}, {}, "the prompt is a str; needed is a list of token ids"),
        ([1, VOCAB], {}, {}, f"token {VOCAB} of the prompt is not in the vocabulary of {VOCAB}"),
        ([-1], {}, {}, "token -1"),
        (torch.tensor([1, 2]), {}, {}, "has a Tensor among its tokens; .* tokens.tolist"),
        ([1, 2.5], {}, {}, "has a float among its tokens; token ids are whole numbers"),
        ([1], {}, {"namespace": ["tenant"]}, "namespace is a list, which cannot be looked up; give a string"),
        ([1] * 60, {"count": 5}, {}, "65 tokens; a request may have 64"),
        ([1] * 30, {"count": 20}, {}, "need 13 pages of 4 tokens in group 0, which has 9"),
    ],
)
def test_a_request_that_cannot_be_is_refused_at_once(
    prompt: Any, own: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    made = engine(pages=10)
    with pytest.raises(InvalidInputError, match=said):
        made.add(prompt, params(**own), **more)
    assert made.unfinished == 0


def test_a_request_that_just_fits_is_run() -> None:
    made = engine(pages=10)  # 36 tokens
    (output,) = made.generate([[2] * 26], params(10))
    assert len(output.token_ids) == 10


def test_unknown_and_finished_requests() -> None:
    made = engine()
    (done,) = made.add(PROMPT, params(1))
    made.step()
    for call in (made.cancel, made.fork, made.tokens_of):
        with pytest.raises(InvalidInputError, match=f"request {done} is not running here"):
            call(done)


def test_a_fork_that_would_make_nothing() -> None:
    made = engine()
    (parent,) = made.add(PROMPT, params(8))
    made.step()
    made.step()
    with pytest.raises(InvalidInputError, match=r"max_new_tokens=2 of a fork of request 0, which has 2 new tokens"):
        made.fork(parent, params(2))


def test_the_layout_is_negotiated_for_the_pool_as_large_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def negotiated(requests: Any, **more: Any) -> Any:
        asked.extend(requests)
        return "HND", ()

    monkeypatch.setattr("polyattn.serving.memory.negotiate_layout", negotiated)
    page = 4 * 2 * 16  # elements of a page of keys
    for pages, large in ((2**31 // page - 1, False), (2**31 // page, True)):
        asked.clear()
        found = _in_shared_layout(MODEL, KVCacheConfig(page_size=4), pages)
        assert (found.layout, {request.large for request in asked}) == ("HND", {large})


def test_a_backend_that_is_not_here_is_named_with_its_flag() -> None:
    with pytest.raises(BackendUnavailableError, match="--decode-attention-backend no_such"):
        engine(decode_backend="no_such")


def test_a_standstill_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    made.add(PROMPT, params(2))
    monkeypatch.setattr(made._scheduler, "schedule", list)
    with pytest.raises(InternalError, match="1 requests wait, none runs and none can start"):
        made.step()


class NotANumber(ToyRunner):
    """After some steps its logits are none."""

    def __init__(self, steps: int, number: float, **more: Any) -> None:
        super().__init__(**more)
        self.left, self.number = steps, number

    def serve(self, backend: Any) -> Any:
        forward = super().serve(backend)

        def serving(*given: Any) -> Any:
            self.left -= 1
            return forward(*given) * (1 if self.left >= 0 else self.number)

        return serving


@pytest.mark.parametrize("own", [{}, {"temperature": 1.5, "top_k": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("steps, drafts", [(0, False), (2, False), (1, True)])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_no_text(own: dict[str, Any], steps: int, drafts: bool, number: float) -> None:
    made = engine(
        model=NotANumber(steps, number), speculative=Speculative(ToyRunner(seed=1), steps=2) if drafts else None
    )
    (request,) = made.add(PROMPT, params(8, **own))
    for _ in range(steps):
        assert not made.step()
    there = made.tokens_of(request)
    said = f"logits of NaN or infinity after {len(PROMPT) + len(there)} tokens of request {request}"
    with pytest.raises(InvalidInputError, match=said):
        made.step()
    assert made.tokens_of(request) == there
    assert made.cancel(request).token_ids == there
    made.check()


def test_arguments_of_another_kind() -> None:
    made = engine()
    for call, said in (
        (
            lambda: made.add(PROMPT, {"max_new_tokens": 3}),
            r"params is a dict; SamplingParams\(\.\.\.\) or None is needed",
        ),
        (lambda: made.generate(None), "prompts is a NoneType; needed is a list of prompts"),
        (lambda: made.generate([PROMPT], 5), "params is a int; needed is SamplingParams, or a list of them"),
        (lambda: made.generate([PROMPT], [5]), "params is a int; SamplingParams"),
        (lambda: made.generate([1, 2]), "the prompt is a int; needed is a list of token ids"),
        (lambda: made.cancel([]), r"request \[\] is not running here"),
        (
            lambda: Engine(MODEL, KVCacheConfig()),
            r"config is a KVCacheConfig; EngineConfig\(\.\.\.\) or None is needed",
        ),
        (lambda: Speculative(MODEL.layers[0]), "the draft model is a AttentionLayer without layers"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            call()  # type: ignore[no-untyped-call]
    assert not made.unfinished


def test_params_for_each_prompt() -> None:
    with pytest.raises(InvalidInputError, match="1 params for 2 prompts"):
        engine().generate([PROMPT, PROMPT], [params()])


@pytest.mark.parametrize(
    "more, said",
    [
        ({"max_requests": 0}, "EngineConfig max_requests=0; 1 or more"),
        ({"max_batch_tokens": 0}, "EngineConfig max_batch_tokens=0; 1 or more"),
        ({"max_batch_tokens": 3, "speculative": Speculative(MODEL, steps=3)}, "max_batch_tokens=3; 4 or more"),
        ({"max_requests": 2.5}, "EngineConfig max_requests=2.5; 1 or more is needed, a whole number"),
        ({"pages": -1}, "EngineConfig pages=-1"),
        ({"max_tokens": "5"}, "EngineConfig max_tokens='5'; 0 or more is needed, a whole number"),
        ({"cache": None}, r"EngineConfig cache=None; KVCacheConfig\(\.\.\.\) is needed"),
        ({"speculative": 3}, r"EngineConfig speculative=3; Speculative\(\.\.\.\) or None is needed"),
        ({"graphs": None}, "EngineConfig graphs=None; True, False or what makes a graph is needed"),
        ({"model": None}, r"the model is a NoneType without layers, .*CausalLMRunner\(model\)"),
        ({"pages": 10**12}, f"a KV pool of 2 layers with {10**12} pages of 4 tokens needs more memory than can be had"),
        (
            {"cache": KVCacheConfig(page_size=10**14)},
            f"a KV pool of 2 layers with 1 pages of {10**14} tokens needs more memory .*: lower the pages or page_size",
        ),
        (
            {"speculative": Speculative(MODEL, topk=VOCAB + 1)},
            f"topk={VOCAB + 1} continuations of a vocabulary of {VOCAB} cannot be had; lower topk",
        ),
        ({"max_tokens": -1}, "EngineConfig max_tokens=-1"),
        ({"max_tokens": 300}, "max_tokens=300 is more than the 256 positions of the model"),
        ({"model": ToyRunner(positions=256), "max_tokens": 0, "positions": 0}, "names no number of positions"),
    ],
)
def test_sizes_that_do_not_fit(more: dict[str, Any], said: str) -> None:
    if "positions" in more:
        more["model"].max_positions = more.pop("positions")
    with pytest.raises(InvalidInputError, match=said):
        engine(**more)


def test_a_draft_model_of_another_vocabulary() -> None:
    draft = ToyRunner()
    draft.vocab_size = 7
    with pytest.raises(InvalidInputError, match=f"draft model has a vocabulary of 7, the target of {VOCAB}"):
        engine(speculative=Speculative(draft))


@pytest.mark.parametrize(
    "more, said",
    [
        ({"steps": 0}, "speculative steps=0; 1 or more is needed, a whole number"),
        ({"topk": 0}, "speculative topk=0; 1 or more is needed"),
        ({"steps": "3"}, "speculative steps='3'; 1 or more is needed"),
        ({"draft_tokens": 2.5}, "speculative draft_tokens=2.5; 0 or more is needed"),
        ({"steps": 3, "draft_tokens": 3}, "allowed: 4, one more than steps"),
        ({"steps": 2, "topk": 2, "draft_tokens": 9}, "allowed: 2 to 7"),
        ({"steps": 2, "topk": 2, "draft_tokens": 1}, "allowed: 2 to 7"),
    ],
)
def test_drafts_that_cannot_be(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        Speculative(MODEL, **more)


def test_usual_sizes_of_drafts() -> None:
    assert Speculative(MODEL, steps=3).draft_tokens == 4
    assert Speculative(MODEL, steps=2, topk=3).draft_tokens == 7


def test_the_model_alone_is_the_model_in_pieces() -> None:
    """The toy's own two ways agree, or nothing above means anything."""
    whole = MODEL.dense(PROMPT)
    assert torch.allclose(whole[:4], MODEL.dense(PROMPT[:4]), atol=1e-5)
