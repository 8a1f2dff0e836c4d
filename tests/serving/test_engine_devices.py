"""The engine on each device: fp32 token for token as `model.generate`, bf16 as close as the model itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams, Speculative
from polyattn.serving.kv_cache.pool import KVCacheConfig
from polyattn.serving.memory import Memory
from polyattn.serving.step.batch import ForwardMode

from .models import deepseek, llama, prompt

PROMPTS = [prompt(20), prompt(7, 1)]
MODELS: dict[str, Any] = {"llama": llama, "deepseek": lambda **more: deepseek(first_k_dense_replace=2, **more)}
"""Without a mixture of experts, whose code in fp32 waits for the device: a graph cannot hold it."""


def generated(model: Any, tokens: list[int], count: int) -> list[int]:
    ids = torch.tensor([tokens], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(params=["cpu", "cuda"])
def where(request: pytest.FixtureRequest, device: Any) -> str:
    device(request.param, what="the engine on this device")
    return str(request.param)


@pytest.mark.parametrize("shape", list(MODELS))
@pytest.mark.parametrize("topk", [0, 1, 2])
def test_fp32_is_model_generate(where: str, shape: str, topk: int) -> None:
    model = MODELS[shape]().to(where)
    draft = CausalLMRunner(MODELS[shape](seed=1).to(where))
    spec = Speculative(draft, steps=2, topk=topk) if topk else None
    engine = Engine(CausalLMRunner(model), EngineConfig(max_tokens=64, speculative=spec))
    outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=10))
    assert [output.token_ids for output in outputs] == [generated(model, tokens, 10) for tokens in PROMPTS]
    engine.check()
    graphs = engine.memory.graphs
    assert (graphs is None) == (where == "cpu")
    if graphs is not None:
        # Drafts are accepted as they agree, so one prompt can be done before the other and leave a graph of one row.
        mode = ForwardMode.TARGET_VERIFY if topk else ForwardMode.DECODE
        assert (mode, 2) in graphs.recorded
        assert {recorded for recorded, _ in graphs.recorded} == {mode}


@pytest.mark.parametrize("shape", list(MODELS))
@torch.no_grad()
def test_bf16_is_as_close_as_the_model(where: str, shape: str) -> None:
    """Logits of a prompt in two chunks and of a decode step, in bf16, against the model in fp32: no further off than
    the model's own bf16 pass, with a quarter to spare."""
    exact = MODELS[shape](initializer_range=0.1).to(where)
    model = copy.deepcopy(exact).bfloat16()
    tokens = prompt(60)
    ids = torch.tensor([tokens], device=where)
    true, own = exact(ids).logits[0], model(ids).logits[0].float()
    memory = Memory(
        CausalLMRunner(model),
        KVCacheConfig(page_size=16),
        pages=8,
        rows=2,
        max_tokens=64,
        step_tokens=64,
        prefixes=False,
    )
    row, found, start = memory.begin(tokens, None), [], 0
    for count, mode in ((40, ForwardMode.EXTEND), (19, ForwardMode.EXTEND), (1, ForwardMode.DECODE)):
        memory.extend([row], count)
        found.append(memory.forward(mode, [row], [count], tokens[start : start + count]).float().clone())
        start += count

    def off(logits: torch.Tensor) -> float:
        return float((logits - true).norm() / true.norm())

    assert 0 < off(torch.cat(found)) <= 1.25 * off(own) < 0.1
