"""`output_attentions=True` gives the weights of the model's own eager attention, with one warning."""

from __future__ import annotations

import pytest
import torch

from polyattn.integrations import transformers as host
from polyattn.integrations.transformers import weights

GATE = 1e-5
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("installed"),
    pytest.mark.filterwarnings("ignore:polyattn. output_attentions=True:RuntimeWarning"),
]

BOTH = ["sliding_attention", "full_attention"]
SHAPES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 10},
    "gpt_oss": {"sliding_window": 4, "layer_types": BOTH, "num_local_experts": 2, "num_experts_per_tok": 1},
}
NAMES = [("llama", "sdpa"), ("mistral", "sdpa"), *((kind, "polyattn") for kind in SHAPES)]


@pytest.fixture
def ids():
    return torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("kind, name", NAMES)
def test_weights_are_those_of_eager(build, relative, ids, kind, name, side):
    if name == "sdpa":
        host.install("sdpa")
    model = build(kind, **SHAPES[kind])
    mask = torch.ones_like(ids)
    mask[0, : 3 if side == "left" else 0] = 0
    out = {}
    for implementation in ("eager", name):
        model.set_attn_implementation(implementation)
        out[implementation] = model(ids, attention_mask=mask, output_attentions=True)
    real = mask.bool()
    assert relative(out[name].logits[real], out["eager"].logits[real]) < GATE
    assert len(out[name].attentions) == 2
    for own, wanted in zip(out[name].attentions, out["eager"].attentions, strict=True):
        assert relative(own.transpose(1, 2)[real], wanted.transpose(1, 2)[real]) < GATE


def test_biases_of_t5_are_in_the_weights(relative, ids):
    sizes = {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 120}
    model = transformers.T5Model(transformers.T5Config(**sizes)).eval()
    out = {}
    for name in ("eager", "polyattn"):
        model.set_attn_implementation(name)
        out[name] = model(input_ids=ids, decoder_input_ids=ids[:, :5], output_attentions=True)
    for kind in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for own, wanted in zip(out["polyattn"][kind], out["eager"][kind], strict=True):
            assert relative(own, wanted) < GATE


def test_a_static_cache_and_decoding(build, relative, ids):
    model = build("llama")
    out = {}
    for name in ("eager", "polyattn"):
        model.set_attn_implementation(name)
        out[name] = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, output_attentions=True,
            return_dict_in_generate=True, cache_implementation="static", disable_compile=True,
        )  # fmt: skip
    assert torch.equal(out["polyattn"].sequences, out["eager"].sequences)
    for own, wanted in zip(out["polyattn"].attentions, out["eager"].attentions, strict=True):
        assert relative(own[0], wanted[0]) < GATE


def test_packed_sequences_stay_apart_in_the_weights(build):
    model = build("llama")
    model.set_attn_implementation("polyattn")
    tokens = torch.randint(3, 120, (2, 5))
    seen = model(tokens, position_ids=torch.tensor([[0, 1, 2, 0, 1]]), output_attentions=True).attentions[0]
    assert not seen[:, :, 3:, :3].any()
    assert seen[:, :, 1, 0].all()


def test_it_is_said_once(build, ids, monkeypatch):
    monkeypatch.setattr(weights, "_told", set())
    model = build("llama")
    model.set_attn_implementation("polyattn")
    with pytest.warns(RuntimeWarning, match="asks LlamaAttention for weights, .* go to the model's own eager") as said:
        _ = [model(ids, output_attentions=True) for _ in range(2)]
    assert sum("output_attentions" in str(one.message) for one in said) == 1


@pytest.mark.parametrize(
    "word", ["special_tokens_mask", "length", "overflow_to_sample_mapping", "num_logits_to_keep", "return_loss"]
)
def test_what_tokenizers_and_trainers_hand_on_is_harmless(build, ids, word):
    model = build("llama")
    model.set_attn_implementation("polyattn")
    value = True if word == "return_loss" else torch.ones_like(ids)
    assert torch.equal(model(ids, **{word: value}).logits, model(ids).logits)
