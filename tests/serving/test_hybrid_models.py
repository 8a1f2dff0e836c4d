"""Models with layers of linear attention in the engine: token for token what `model.generate` says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from polyattn.errors import BackendUnavailableError, InvalidInputError
from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.semantics.linear_conv import causal_conv
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams, Speculative
from polyattn.serving.graphs.graphs import FakeGraph
from polyattn.serving.kv_cache.pool import KVCacheConfig
from polyattn.serving.recurrent import LinearChoice
from polyattn.serving.step.batch import ForwardMode

from .models import HYBRID, llama, prompt

NEW = 14
NEAR = 1e-4
"""Of two logits: closer ones may change places by rounding alone, and with them everything that follows."""
PROMPTS = [prompt(70, 1), prompt(33, 2), prompt(1, 3), prompt(5, 4)]
GREEDY = SamplingParams(max_new_tokens=NEW)

pytestmark = [
    pytest.mark.filterwarnings("ignore:polyattn. prompts that begin alike are run anew:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:polyattn. latent attention is served from whole keys:RuntimeWarning"),
]


@functools.cache
def model(shape: str, seed: int = 0) -> Any:
    return HYBRID[shape](seed=seed)


@functools.cache
def runner(shape: str) -> CausalLMRunner:
    return CausalLMRunner(model(shape))


@functools.cache
def expected(shape: str, tokens: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """What `model.generate` says, and how far its first choice was from its second, at each place."""
    ids = torch.tensor([tokens])
    options: Any = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": NEW}
    out = model(shape).generate(ids, attention_mask=torch.ones_like(ids), **options)
    best = [logits[0].topk(2).values for logits in out.logits]
    return out.sequences[0, len(tokens) :].tolist(), [float(first - second) for first, second in best]


def agree(shape: str, prompts: Sequence[list[int]], outputs: Sequence[Any]) -> None:
    for tokens, output in zip(prompts, outputs, strict=True):
        ids, gaps = expected(shape, tuple(tokens))
        near = next((n for n, gap in enumerate(gaps) if gap < NEAR), NEW)
        assert near > NEW // 2, "most of the text is compared"
        assert output.token_ids[:near] == ids[:near]


def engine(shape: str, page_size: int = 16, **more: Any) -> Engine:
    return Engine(runner(shape), EngineConfig(cache=KVCacheConfig(page_size=page_size), max_tokens=128, **more))


each = pytest.mark.parametrize("shape", list(HYBRID))


@pytest.mark.slow(keep=3)
@each
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_mixed_batches_and_prompts_in_chunks(shape: str, page_size: int) -> None:
    made = engine(shape, page_size, max_batch_tokens=13)
    outputs = made.generate(PROMPTS, GREEDY)
    agree(shape, PROMPTS, outputs)
    made.check()
    assert all(output.cached_tokens == 0 for output in outputs)


@each
def test_requests_that_lose_their_pages_are_run_again(shape: str) -> None:
    made = engine(shape, 4, pages=34, max_requests=3)
    outputs = made.generate(PROMPTS, GREEDY)
    agree(shape, PROMPTS, outputs)
    assert sum(output.preemptions for output in outputs) > 0
    made.check()


@each
def test_a_fork_goes_on_from_the_state_it_has(shape: str) -> None:
    made = engine(shape)
    (number,) = made.add(PROMPTS[1], GREEDY)
    for _ in range(5):
        made.step()
    made.fork(number)
    outputs = []
    while made.unfinished:
        outputs += made.step()
    agree(shape, [PROMPTS[1]] * 2, outputs)
    made.check()


@pytest.mark.slow(keep=2)
@each
@pytest.mark.parametrize("spec", [{"steps": 3}, {"steps": 2, "topk": 3, "draft_tokens": 8}], ids=["chain", "tree"])
def test_drafts_are_verified(shape: str, spec: dict[str, Any]) -> None:
    """By a draft model that is often right: the state and the tail of the accepted token are committed together."""
    draft = CausalLMRunner(llama())
    made = engine(shape, max_batch_tokens=48, speculative=Speculative(draft, **spec))
    agree(shape, PROMPTS, made.generate(PROMPTS, GREEDY))
    made.check()


def test_who_serves_is_said_for_each_phase() -> None:
    choice = LinearChoice(prefill="torch_native", decode="reference")
    agree("qwen3_next", PROMPTS[1:2], engine("qwen3_next", linear=choice).generate(PROMPTS[1:2], GREEDY))
    with pytest.raises(BackendUnavailableError, match="torch_nativ"):
        engine("qwen3_next", linear=LinearChoice(decode="torch_nativ")).generate(PROMPTS[1:2], GREEDY)


class Ops:
    """A package whose kernel is the definition, over the tails of a pool as the contract says."""

    name = "acme"

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def causal_conv(
        self, x: Any, weight: Any, bias: Any, tails: Any, slots: Any, *, cu_seqlens: Any, parents: Any, drafted: Any
    ) -> Any:
        every = drafted is not None
        self.calls.append(every)
        given = torch.where((slots < 0)[:, None, None], 0.0, tails[slots])
        out, last = causal_conv(x, weight, bias, given, cu_seqlens=cu_seqlens, every_state=every, parents=parents)
        kept = slots >= 0
        if every:
            drafted[slots[kept], : x.shape[1]] = last[kept]
        else:
            tails[slots[kept]] = last[kept]
        return out


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("spec", [None, {"steps": 3}, {"steps": 2, "topk": 3, "draft_tokens": 8}])
def test_convolutions_of_a_package_serve_where_they_are_asked_for(
    spec: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = Ops()
    monkeypatch.setattr("polyattn.serving.recurrent.device_ops", lambda device_type: ops)
    agree("qwen3_5", PROMPTS, engine("qwen3_5", max_batch_tokens=13).generate(PROMPTS, GREEDY))
    assert not ops.calls
    drafts = None if spec is None else Speculative(CausalLMRunner(llama()), **spec)
    made = engine("qwen3_5", max_batch_tokens=48, speculative=drafts, linear=LinearChoice(conv="acme"))
    agree("qwen3_5", PROMPTS, made.generate(PROMPTS, GREEDY))
    assert set(ops.calls) == ({False} if spec is None else {False, True})
    with pytest.raises(BackendUnavailableError, match=r"conv='acne'.*on cpu.*polyattn, acme"):
        engine("qwen3_5", linear=LinearChoice(conv="acne"))


def test_layers_are_asked_in_a_planned_step_only() -> None:
    made = engine("qwen3_next")
    layers = made.memory._forward.recurrent
    assert layers is not None
    layers._batch = None
    with pytest.raises(InvalidInputError, match="no step is planned"):
        layers.conv(1, torch.zeros(1, 4), torch.zeros(4, 4), None)


def test_the_models_functions_are_its_own_again_after_a_step() -> None:
    import sys

    made = engine("qwen3_next")
    module = sys.modules[type(model("qwen3_next")).__module__]
    before = module.torch_chunk_gated_delta_rule
    made.generate(PROMPTS[3:], GREEDY)
    assert module.torch_chunk_gated_delta_rule is before


# Experts of Qwen3-Next wait for the device: such a step cannot be recorded, which is not about linear attention.
recordable = pytest.mark.parametrize("shape", [shape for shape in HYBRID if shape != "qwen3_next"])


@pytest.mark.slow(keep=1)
@recordable
def test_decode_is_replayed_from_recordings(shape: str) -> None:
    """Batches grow and shrink, rows are padded, and slots are those of each step's requests."""
    made = engine(shape, 16, graphs=FakeGraph, backend="torch_sdpa", max_batch_tokens=13)
    agree(shape, PROMPTS, made.generate(PROMPTS, GREEDY))
    agree(shape, PROMPTS[::-1], made.generate(PROMPTS[::-1], GREEDY))
    assert made.memory.graphs is not None
    assert {size for _, size in made.memory.graphs.recorded} >= {2, 4}
    made.check()


@pytest.mark.slow(keep=1)
@recordable
@pytest.mark.parametrize("spec", [{"steps": 3}, {"steps": 2, "topk": 3, "draft_tokens": 8}], ids=["chain", "tree"])
def test_verification_is_replayed_from_recordings(shape: str, spec: dict[str, Any]) -> None:
    made = engine(
        shape,
        graphs=FakeGraph,
        backend="torch_sdpa",
        max_batch_tokens=48,
        speculative=Speculative(CausalLMRunner(llama()), **spec),
    )
    agree(shape, PROMPTS, made.generate(PROMPTS, GREEDY))
    assert made.memory.graphs is not None
    assert ForwardMode.TARGET_VERIFY in {mode for mode, _ in made.memory.graphs.recorded}
    made.check()
