"""transformers' generate on polyattn, with random weights: a program to record and to tune.

    polyattn trace -- python examples/transformers_generate.py
    polyattn tune --from trace.jsonl
    polyattn trace --compare -- python examples/transformers_generate.py

On a GPU a Llama of 1.2 billion weights with two prompts of 8,192 tokens, on a CPU a tiny one.
"""

from __future__ import annotations

import os
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polyattn.integrations.transformers import install

GPU = torch.cuda.is_available()
VOCAB, BATCH, PROMPT, NEW = (32000, 2, 8192, 64) if GPU else (100, 1, 4, 6)
SIZES = {
    "hidden_size": 4096 if GPU else 64,
    "intermediate_size": 8192 if GPU else 64,
    "num_hidden_layers": 7 if GPU else 2,
    "num_attention_heads": 32 if GPU else 4,
    "num_key_value_heads": 8 if GPU else 2,
}


def main() -> None:
    install()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=PROMPT + NEW, eos_token_id=None, pad_token_id=0, **SIZES
    )
    with torch.device("cuda" if GPU else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if GPU else torch.float32).eval()
        # No padding: id 0 would be masked, and a mask is another request.
        prompts = torch.randint(1, VOCAB, (BATCH, PROMPT))
    model.set_attn_implementation("polyattn")
    for _ in range(3 if GPU else 1):  # on a GPU kernels are compiled in the first
        began = time.perf_counter()
        tokens = model.generate(prompts, max_new_tokens=NEW, do_sample=False)
        print(f"{tokens.shape[1] - PROMPT} tokens of each in {time.perf_counter() - began:.3f} s")


if __name__ == "__main__":
    main()
