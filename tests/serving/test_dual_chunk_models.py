"""Models of dual chunk attention, as Qwen2.5-1M is, against transformers' own layers with a matrix of positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from polyattn.errors import UnsupportedRequestError
from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.serving.dual_chunk import DualChunk
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams, Speculative
from polyattn.serving.kv_cache.pool import KVCacheConfig

from . import test_dual_chunk as matrix
from .models import _COMMON, prompt

CHUNKS = {"chunk_size": 24, "local_size": 8, "original_max_position_embeddings": 32}


def qwen(dtype: torch.dtype = torch.float64, **own: Any) -> Any:
    torch.manual_seed(0)
    own = {"initializer_range": 0.4, "dual_chunk_attention_config": CHUNKS, **own}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**_COMMON, **own})).eval().to(dtype)
    model.generation_config.eos_token_id = None
    return model


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Every token anew, all queries and keys at position 0, from which the attention turns them itself."""
    rotary = model.model.rotary_emb

    def rotate(rows: Tensor, positions: Tensor) -> Tensor:
        flat = positions[:, 0][None]
        cos, sin = (t[0][:, None] for t in rotary(rows, flat))
        a, b = rows.chunk(2, -1)
        return rows * cos + torch.cat([-b, a], -1) * sin

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        before, matrix.SCALE = matrix.SCALE, module.scaling
        try:
            return matrix.by_matrix(DualChunk(**CHUNKS), q, k, v, rotate)[None], None
        finally:
            matrix.SCALE = before

    name = "by_matrix_of_positions"
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, lambda *_, **__: None)
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    found = list(tokens)
    try:
        with torch.no_grad():
            for _ in range(count):
                where = torch.zeros(1, len(found), dtype=torch.int64)
                logits = model(input_ids=torch.tensor([found]), position_ids=where, use_cache=False).logits
                found.append(int(logits[0, -1].argmax()))
    finally:
        model.config._attn_implementation = before
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            registry._global_mapping.pop(name, None)
    return found[len(tokens) :]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("graphs", [False, True])
def test_generate_across_chunks(graphs: bool) -> None:
    model = qwen()
    config = EngineConfig(KVCacheConfig(page_size=8), max_batch_tokens=20, graphs=graphs)
    engine = Engine(CausalLMRunner(model), config)
    prompts = [prompt(n, n) for n in (5, 14, 37, 61)]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=8))
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == greedy(model, tokens, 8)
    again = engine.generate(prompts[-1:], SamplingParams(max_new_tokens=8))[0]
    assert again.cached_tokens
    assert again.token_ids == outputs[-1].token_ids


def test_plain_attention_is_another_function() -> None:
    """What the test above compares does depend on chunks."""
    model = qwen()
    engine = Engine(CausalLMRunner(model), EngineConfig(KVCacheConfig(page_size=8)))
    chunked = engine.generate([prompt(61, 61)], SamplingParams(max_new_tokens=8))[0].token_ids
    model.config.dual_chunk_attention_config = None
    plain = Engine(CausalLMRunner(model), EngineConfig(KVCacheConfig(page_size=8)))
    assert plain.generate([prompt(61, 61)], SamplingParams(max_new_tokens=8))[0].token_ids != chunked


def test_drafts_are_refused() -> None:
    runner = CausalLMRunner(qwen())
    spec = Speculative(CausalLMRunner(qwen(dual_chunk_attention_config=None)), 3, 1, 0)
    with pytest.raises(UnsupportedRequestError, match=r"dual chunk attention .* build without speculation"):
        Engine(runner, EngineConfig(KVCacheConfig(page_size=8), speculative=spec))


def test_rotations_of_another_kind_are_refused() -> None:
    config = transformers.CohereConfig(**{**_COMMON, "dual_chunk_attention_config": CHUNKS})
    model = transformers.CohereForCausalLM(config).eval()
    with pytest.raises(UnsupportedRequestError, match=r"CohereAttention turns its queries otherwise .* = None first"):
        CausalLMRunner(model)


def test_models_without_one_rotation_are_refused() -> None:
    model = qwen()
    model.other = torch.nn.Module()
    model.other.inv_freq = torch.zeros(1)
    with pytest.raises(UnsupportedRequestError, match="2 modules make its rotary positions"):
        CausalLMRunner(model)
