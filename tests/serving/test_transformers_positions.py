"""What `CausalLMRunner` finds out about positions: a key is made of its token and its position, or it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams
from polyattn.serving.kv_cache.pool import KVCacheConfig

from .models import _COMMON, llama, prompt


def made(name: str, **own: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, "initializer_range": 0.4, **own})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.generation_config.eos_token_id = None
    return model


def longrope() -> Any:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **factors}
    return made("Phi3", max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope)


def dynamic(**own: Any) -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return llama(max_position_embeddings=16, rope_parameters=rope, **own)


def same_as_alone(model: Any, runner: CausalLMRunner, *lengths: int) -> None:
    prompts = [prompt(n, n) for n in lengths]
    engine = Engine(runner, EngineConfig(KVCacheConfig(page_size=4)))
    for tokens, output in zip(prompts, engine.generate(prompts, SamplingParams(max_new_tokens=6)), strict=True):
        ids = torch.tensor([tokens])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert output.token_ids == alone[0, len(tokens) :].tolist()


def test_keys_that_change_with_the_longest_request() -> None:
    said = (
        r"the keys of Phi3Attention change .* at position 16 or later: .* beside a longer one, .* stale, so .* at "
        r"every length \(CausalLMRunner\(model, max_positions=16\) serves requests that end before\)"
    )
    with pytest.raises(UnsupportedRequestError, match=said):
        CausalLMRunner(longrope())


def test_below_the_border_they_are_served() -> None:
    model = longrope()
    runner = CausalLMRunner(model, max_positions=16)
    assert runner.max_positions == 16
    same_as_alone(model, runner, 5, 9)
    engine = Engine(runner, EngineConfig(KVCacheConfig(page_size=4)))
    with pytest.raises(InvalidInputError, match=r"a request may have 16 here"):
        engine.add(prompt(12), SamplingParams(max_new_tokens=6))
    with pytest.raises(InvalidInputError, match="max_tokens=32 is more than the 16 positions"):
        Engine(runner, EngineConfig(max_tokens=32))


def test_frequencies_that_grow_are_left_small() -> None:
    model = dynamic()
    same_as_alone(model, CausalLMRunner(model), 4, 9)  # within its positions nothing grows
    model.model.rotary_emb.config = copy.deepcopy(model.config)
    model.config.max_position_embeddings = 64
    with pytest.raises(UnsupportedRequestError, match=r"LlamaAttention change .* position \d+ or later"):
        CausalLMRunner(model)
    assert model.model.rotary_emb.max_seq_len_cached == 16


SIZES = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "is_decoder": True}


@pytest.mark.parametrize("name", ["Bart", "MBart", "Marian", "Pegasus", "Blenderbot", "PLBart"])
def test_models_that_count_positions_themselves(name: str) -> None:
    own = {**SIZES, "decoder_start_token_id": 1} if name == "Marian" else SIZES
    with pytest.raises(
        UnsupportedRequestError, match=rf"equal positions reached {name}Attention as different .* ignores position_ids"
    ):
        CausalLMRunner(made(name, **own))


def test_models_with_learned_positions_that_listen_are_served() -> None:
    model = made("OPT", ffn_dim=32, word_embed_proj_dim=32)
    same_as_alone(model, CausalLMRunner(model), 5, 9)


def test_compressed_keys() -> None:
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip(f"not run: DeepSeek-V4 (transformers {transformers.__version__} has none)")
    sizes = {"head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(
        UnsupportedRequestError, match=r"257 tokens reached DeepseekV4Attention with 259 keys: .* compressed keys"
    ):
        CausalLMRunner(made("DeepseekV4", **sizes))


@pytest.mark.parametrize("wanted", [0, 513, True, 2.5])
def test_max_positions_are_positions_of_the_model(wanted: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"max_positions={wanted}; a whole number from 1 to 512"):
        CausalLMRunner(llama(), max_positions=wanted)
