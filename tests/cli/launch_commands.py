"""The launch commands of SGLang's pages on attention backends, each once, after `python3 -m sglang.launch_server`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

LLAMA, DEEPSEEK_V3, DEEPSEEK_R1 = (
    "meta-llama/Meta-Llama-3.1-8B-Instruct",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-R1",
)
FP4, MIXED = "nvidia/DeepSeek-R1-FP4", "Qwen/Qwen3.5-35B-A3B-FP8"
MOE, LONG = "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "Qwen/Qwen2.5-14B-Instruct-1M"
ONE, TRUST = f"--model {LLAMA} --attention-backend", "--trust-remote-code"
V3, R1 = (f"--tp 8 --model {model}" for model in (DEEPSEEK_V3, DEEPSEEK_R1))
FOUR_BITS = (
    f"--model-path {FP4} --tp 8 --attention-backend trtllm_mla --moe-runner-backend flashinfer_trtllm "
    "--quantization modelopt_fp4"
)

ONE_DEVICE = {
    f"{ONE} flashinfer": "cuda:sm80",
    f"{ONE} fa3": "cuda:sm90",
    f"{ONE} triton": "cuda:sm90",
    f"{ONE} torch_native": "cuda:sm90",
    f"{ONE} flex_attention": "cuda:sm90",
    f"{ONE} ascend": "npu",
    f"{ONE} intel_xpu": "xpu",
    f"{ONE} wave": "rocm:gfx942",
    f"--model-path {MOE} --attention-backend fa4 --page-size 128 {TRUST}": "cuda:sm100",
    f"--model {LONG} --attention-backend dual_chunk_flash_attn": "cuda:sm90",
}
"""Commands for one device -> the chip that the page names for them."""

MANY_DEVICES = (
    f"{FOUR_BITS} --prefill-attention-backend fa4",
    f"{V3} --attention-backend flashinfer {TRUST}",
    f"{V3} {TRUST} --attention-backend fa3",
    f"{V3} --attention-backend triton {TRUST}",
    f"{R1} --attention-backend flashmla {TRUST}",
    f"{R1} --attention-backend flashmla --kv-cache-dtype fp8_e4m3 {TRUST}",
    f"{R1} --attention-backend trtllm_mla {TRUST}",
    f"{R1} --attention-backend trtllm_mla --kv-cache-dtype fp8_e4m3 {TRUST}",
    f"--tp 4 --model {MIXED} --attention-backend trtllm_mha {TRUST}",
    f"--tp 4 --model {MIXED} --decode-attention-backend trtllm_mha {TRUST}",
    f"{R1} --prefill-attention-backend fa4 {TRUST}",
    f"{R1} --attention-backend cutlass_mla {TRUST}",
)


def configs() -> dict[str, Any]:
    """The configs of small models of the kinds that these commands name."""
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    small: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64}
    latent: dict[str, Any] = {"num_attention_heads": 16, "q_lora_rank": 64, **small}
    return {
        LLAMA: transformers.LlamaConfig(**small, **heads),
        **{name: transformers.DeepseekV3Config(**latent) for name in (DEEPSEEK_V3, DEEPSEEK_R1, FP4)},
        MIXED: transformers.Qwen3_5MoeTextConfig(**small, **{**heads, "head_dim": 256}),
        MOE: transformers.Qwen3MoeConfig(**small, **heads),
        LONG: transformers.Qwen2Config(
            **{**small, "hidden_size": 512}, num_attention_heads=4, num_key_value_heads=2,
            dual_chunk_attention_config={"chunk_size": 256, "local_size": 64, "original_max_position_embeddings": 256},
        ),
    }  # fmt: skip


def here(command: str, folder: Path) -> list[str]:
    """A command's words, its model replaced by a small one of the kind that is saved in a folder."""
    known, words = configs(), command.split()
    for at, word in enumerate(words):
        if word in known:
            words[at] = str(folder / word)
            if not Path(words[at]).exists():
                known[word].save_pretrained(words[at])
    return words
