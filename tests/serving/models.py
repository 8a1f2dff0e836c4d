"""Tiny models of four shapes with random weights, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def llama(**changes: Any) -> Any:
    return _made(transformers.LlamaConfig, transformers.LlamaForCausalLM, head_dim=8, **changes)


def deepseek(**changes: Any) -> Any:
    own: dict[str, Any] = {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    return _made(transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, **{**own, **changes})


def gpt_oss(**changes: Any) -> Any:
    own: dict[str, Any] = {
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_experts_per_tok": 2,
    }
    model = _made(transformers.GptOssConfig, transformers.GptOssForCausalLM, **{**own, **changes})
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight, std=1.0)
    return model


def gemma2(**changes: Any) -> Any:
    own: dict[str, Any] = {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 30.0,
    }
    return _made(transformers.Gemma2Config, transformers.Gemma2ForCausalLM, **{**own, **changes})


def qwen3_next(**changes: Any) -> Any:
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    own |= {"shared_expert_intermediate_size": 16, "head_dim": 8, "layer_types": MIXED, **LINEAR}
    return _made(transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM, **{**own, **changes})


def qwen3_5(**changes: Any) -> Any:
    own = {"head_dim": 8, "layer_types": MIXED, **LINEAR}
    return _made(transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM, **{**own, **changes})


def kimi_linear(**changes: Any) -> Any:
    own: dict[str, Any] = {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": MIXED,
        "mlp_layer_types": ["dense"] * 2,
    }
    return _made(transformers.KimiLinearConfig, transformers.KimiLinearForCausalLM, **{**own, **changes})


def olmo_hybrid(**changes: Any) -> Any:
    own = {"layer_types": MIXED, **LINEAR}
    return _made(transformers.OlmoHybridConfig, transformers.OlmoHybridForCausalLM, **{**own, **changes})


MIXED = ["linear_attention", "full_attention"]
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
HYBRID = {"qwen3_next": qwen3_next, "qwen3_5": qwen3_5, "kimi_linear": kimi_linear, "olmo_hybrid": olmo_hybrid}
"""Models with a layer of linear attention and one of full attention."""
SHAPES = {"llama": llama, "deepseek": deepseek, "gpt_oss": gpt_oss, "gemma2": gemma2}


def _made(config: Any, kind: Any, **changes: Any) -> Any:
    torch.manual_seed(changes.pop("seed", 0))
    # Wide weights, so that attention is far from uniform and the largest logit stands out.
    made = kind(config(**{**_COMMON, "initializer_range": 0.4, **changes})).eval()
    made.generation_config.eos_token_id = None
    return made


def prompt(length: int, seed: int = 0) -> list[int]:
    drawn = torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return drawn.tolist()  # type: ignore[no-any-return]
