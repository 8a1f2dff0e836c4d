"""A tiny model in a folder and a server over it, for tests of `polyattn serve`."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<unk>", "<end>", *(f"w{number}" for number in range(62))]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def saved(folder: Path, **changes: Any) -> Path:
    """Save a Llama of random weights with a tokenizer of whole words and a chat template that joins messages."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "eos_token_id": None,
        "bos_token_id": None,
        **changes,
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(folder)
    return folder


def expected(folder: Path, prompt: str, count: int) -> str:
    """The text that transformers' own `generate` continues a prompt by."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[WORDS.index(word) for word in prompt.split()]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@contextlib.contextmanager
def served(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, as the command starts it; its address."""
    command = [sys.executable, "-m", "polyattn", "serve", "--model-path", str(folder), "--port", "0", *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    reader = threading.Thread()
    try:
        seen = []
        for line in server.stderr:
            seen.append(line)
            if found := re.search(r"http://[\w.:]+", line):
                break
        else:
            raise AssertionError("".join(seen))
        # What it says later must not fill the pipe.
        reader = threading.Thread(target=server.stderr.read, daemon=True)
        reader.start()
        yield server, found[0]
    finally:
        server.kill()
        server.wait()
        if reader.ident is not None:
            reader.join()
        server.stderr.close()
