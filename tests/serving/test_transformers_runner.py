"""`CausalLMRunner`: what is read from a model, what is refused, and that the model is left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.integrations.transformers import probing
from polyattn.integrations.transformers.serving import SERVING, CausalLMRunner
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams
from polyattn.serving.kv_cache.pool import KVCacheConfig

from .models import SHAPES, deepseek, gemma2, gpt_oss, llama, prompt

# Where nothing else serves a softcap the reference does, and says so.


def test_layers_are_read_from_the_calls() -> None:
    full, window = CausalLMRunner(llama()).layers[0], CausalLMRunner(gemma2()).layers
    assert (full.heads, full.kv_heads, full.head_dim, full.window, full.scale) == (4, 2, 8, -1, 8**-0.5)
    assert [layer.window for layer in window] == [4, -1], "transformers counts the row's own key"
    assert {layer.softcap for layer in window} == {4.0}
    model = gpt_oss()
    layers = CausalLMRunner(model).layers
    assert [layer.window for layer in layers] == [5, -1]
    assert layers[0].sinks is not None
    assert torch.equal(layers[0].sinks, model.model.layers[0].self_attn.sinks)


def test_latent_layers_are_served_from_rows_unless_told_otherwise() -> None:
    model = deepseek()
    latent, whole = CausalLMRunner(model), CausalLMRunner(model, latent=False)
    assert [(layer.latent, layer.head_dim, layer.kv_heads) for layer in latent.layers] == [(True, 20, 1)] * 2
    assert [(layer.latent, layer.head_dim, layer.v_head_dim) for layer in whole.layers] == [(False, 12, 12)] * 2
    own = SamplingParams(max_new_tokens=6)
    config = EngineConfig(KVCacheConfig(page_size=4), max_tokens=32)
    outputs = [Engine(runner, config).generate([prompt(9)], own)[0].token_ids for runner in (latent, whole)]
    assert outputs[0] == outputs[1]
    with pytest.raises(UnsupportedRequestError, match="has no latent attention"):
        CausalLMRunner(llama(), latent=True)


def test_latent_rows_in_a_mixed_step_of_two_backends() -> None:
    model, prompts = deepseek(), [prompt(2), prompt(20, 1)]
    config = EngineConfig(
        KVCacheConfig(page_size=4), max_tokens=32, max_batch_tokens=6, prefill_backend="torch_sdpa",
        decode_backend="torch_native",
    )  # fmt: skip
    outputs = Engine(CausalLMRunner(model), config).generate(prompts, SamplingParams(max_new_tokens=6))
    for tokens, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([tokens])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert output.token_ids == out[0, len(tokens) :].tolist()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_model_is_left_as_it_was(shape: str) -> None:
    model = SHAPES[shape]()
    before, forwards = model.config._attn_implementation, [vars(m).get("forward") for m in model.modules()]
    ids = torch.tensor([prompt(6)])
    first = model(ids).logits
    Engine(CausalLMRunner(model), EngineConfig(max_tokens=32)).generate([prompt(6)], SamplingParams(max_new_tokens=2))
    assert model.config._attn_implementation == before
    assert [vars(m).get("forward") for m in model.modules()] == forwards
    assert torch.equal(model(ids).logits, first)
    names = transformers.modeling_utils.AttentionInterface._global_mapping
    assert SERVING in names
    assert probing.PROBE not in names
    assert probing.PROBE not in transformers.masking_utils.AttentionMaskInterface._global_mapping


def test_two_models_in_turn() -> None:
    models = [llama(), gemma2(attn_logit_softcapping=None)]
    engines = [Engine(CausalLMRunner(model), EngineConfig(max_tokens=32)) for model in models]
    for engine in engines:
        engine.add(prompt(5), SamplingParams(max_new_tokens=4))
    outputs: list[list[int]] = [[], []]
    while any(engine.unfinished for engine in engines):
        for n, engine in enumerate(engines):
            outputs[n] += [token for output in engine.step() for token in output.token_ids]
    for model, tokens in zip(models, outputs, strict=True):
        ids = torch.tensor([prompt(5)])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert tokens == expected[0, 5:].tolist()


def test_logits_of_the_tokens_asked_for_only() -> None:
    model = llama()
    widths: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    runner = CausalLMRunner(model)
    assert set(widths) == {1}, "the probe looks at no logits"
    widths.clear()
    Engine(runner, EngineConfig(max_tokens=32)).generate([prompt(9), prompt(4)], SamplingParams(max_new_tokens=3))
    # Two rows of 9 and 4 tokens, then a token each.
    assert widths == [2, 2, 2]


def test_a_model_that_gives_all_logits_is_cut_afterwards() -> None:
    class Plain(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any, position_ids: Any, use_cache: Any) -> Any:
            return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    model = llama()
    expected = Engine(CausalLMRunner(model), EngineConfig(max_tokens=32)).generate([prompt(9)])[0].token_ids
    plain = copy.deepcopy(model)
    plain.__class__ = Plain
    runner = CausalLMRunner(plain)
    assert not runner.picks
    assert Engine(runner, EngineConfig(max_tokens=32)).generate([prompt(9)])[0].token_ids == expected


OTHERS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 6},
    "Qwen3": {},
    "Qwen2Moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4},
    "Phi3": {"sliding_window": 6},
    "Cohere2": {"sliding_window": 6},
    "GPTNeoX": {"num_key_value_heads": 4},
    "GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 4},
    "DeepseekV2": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "head_dim": 4, "v_head_dim": 12, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
"""Other architectures: what their configurations need beside the common sizes."""


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_architectures(name: str) -> None:
    """Qwen2-MoE makes a mask that none of its layers gets; GPT-2 adds positions; Cohere 2 has layers without any."""
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": None,
        "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    model = kind(getattr(transformers, f"{name}Config")(**{**sizes, **OTHERS[name]})).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt(20)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    config = EngineConfig(KVCacheConfig(page_size=4), max_tokens=32, max_batch_tokens=7)
    outputs = Engine(CausalLMRunner(model), config).generate([prompt(20)], SamplingParams(max_new_tokens=8))
    assert outputs[0].token_ids == out[0, 20:].tolist()


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_training_model() -> None:
    with pytest.raises(InvalidInputError, match=r"LlamaForCausalLM is in training mode; call model.eval\(\)"):
        CausalLMRunner(llama().train())


def test_the_name_of_steps_is_for_steps() -> None:
    model = llama()
    CausalLMRunner(model)
    model.set_attn_implementation(SERVING)
    with pytest.raises(InvalidInputError, match="outside a step: that name is for CausalLMRunner alone"):
        model(torch.tensor([prompt(3)]))


def patched(change: Any) -> Any:
    """A llama whose layers call their attention function with something more or something else."""
    model = llama()
    for layer in model.model.layers:
        attention = layer.self_attn
        forward = attention.forward

        def other(*args: Any, _own: Any = forward, **kwargs: Any) -> Any:
            return _own(*args, **change(kwargs))

        attention.forward = other
    return model


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda kw: {**kw, "is_causal": False}, "is_causal=False reached LlamaAttention"),
        (lambda kw: {**kw, "position_bias": torch.zeros(1, 4, 3, 3)}, "position_bias reached LlamaAttention"),
        (lambda kw: {**kw, "seq_idx": torch.zeros(1, 3)}, "packed sequences reached LlamaAttention"),
        (
            lambda kw: {**kw, "attention_mask": torch.ones(1, 1, 3, 3)},
            "a mask of its own making reached LlamaAttention",
        ),
        (lambda kw: {**kw, "surprise": 3}, "unknown keyword surprise"),
        (
            lambda kw: {**kw, "output_attentions": True},
            r"output_attentions reached .* stores no weights.*; leave it out",
        ),
    ],
)
def test_attention_that_pages_cannot_serve(change: Any, said: str) -> None:
    with pytest.raises(UnsupportedRequestError, match=said):
        CausalLMRunner(patched(change))


def test_a_cache_of_another_kind() -> None:
    rows = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UnsupportedRequestError, match=r"cache reached Module .* has no other cache; leave it out"):
        probing.reading(lambda *_: rows)(nn.Module(), rows, rows, rows, cache=3)


def test_dropout_is_refused() -> None:
    model = llama(attention_dropout=0.5)
    for layer in model.model.layers:
        layer.self_attn.train()
    with pytest.raises(UnsupportedRequestError, match="dropout reached LlamaAttention"):
        CausalLMRunner(model)


def test_masks_of_another_kind() -> None:
    """Llama 4's chunked layers look like causal ones in a short pass; the mask function tells them apart."""
    config = transformers.Llama4TextConfig(
        vocab_size=31, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, attention_chunk_size=64,
        layer_types=["chunked_attention", "full_attention"], max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(UnsupportedRequestError, match="in chunks, reached Llama4TextAttention"):
        CausalLMRunner(transformers.Llama4ForCausalLM(config).eval())


def test_a_mask_that_looks_something_up() -> None:
    table = torch.zeros(1, 3)
    assert not probing._is_plain(lambda b, h, q, k: table[b, q] == table[b, k], -1)
    assert not probing._is_plain(lambda b, h, q, k: k <= q, 7)
    assert probing._is_plain(lambda b, h, q, k: (k <= q) & (k > q - 8), 7)


def test_what_a_mask_looks_up_on_a_device_is_looked_up_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU answers an index behind the end with an assertion, which ends its context."""
    real = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else real(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    for length, plain in ((3, False), (5000, True)):
        table = torch.empty(1, length, device="meta")
        assert probing._is_plain(lambda b, h, q, k, t=table: (t[b, q] == t[b, k]) & (k <= q), -1) is plain


def test_attention_in_a_models_own_code() -> None:
    config = transformers.BloomConfig(vocab_size=31, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(UnsupportedRequestError, match="no attention call of BloomForCausalLM reached polyattn"):
        CausalLMRunner(transformers.BloomForCausalLM(config).eval())


def test_layers_with_a_state_of_their_own() -> None:
    model = llama()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(UnsupportedRequestError, match="1 of the 2 layers of LlamaForCausalLM attend"):
        CausalLMRunner(model)


def test_a_layer_that_attends_twice() -> None:
    model = llama()
    model.model.layers = nn.ModuleList([model.model.layers[0]] * 2)
    with pytest.raises(UnsupportedRequestError, match="LlamaAttention attends twice in one pass"):
        CausalLMRunner(model)


def test_layers_that_share_keys() -> None:
    model = llama()
    model.config.num_kv_shared_layers = 1
    with pytest.raises(UnsupportedRequestError, match="1 layers of LlamaForCausalLM use other layers' keys"):
        CausalLMRunner(model)
