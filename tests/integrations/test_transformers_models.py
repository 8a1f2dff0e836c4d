"""Models on polyattn give what they give on eager: forward, generate, gradients. Relative L2 < 1e-5 in fp32.

Rows of padding are left out: eager fills them with an average of everything, polyattn with zeros (S7).
"""

from __future__ import annotations

import copy

import pytest
import torch

import polyattn
from polyattn.integrations import transformers as host
from polyattn.integrations.transformers import registry
from polyattn.integrations.transformers.guard import SHOWN

from .conftest import rough

GATE = 1e-5
# Softcap goes to the reference on the CPU, which says so once.
pytestmark = pytest.mark.usefixtures("installed")
transformers = pytest.importorskip("transformers")

BOTH = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
SHAPES = {
    "llama": {},
    "gemma2": {"sliding_window": 4, "num_hidden_layers": 4, "query_pre_attn_scalar": 10},
    "gpt_oss": {"sliding_window": 4, "layer_types": BOTH, **EXPERTS},
}
OTHERS = {
    "flint": {"num_experts": 2, **EXPERTS},
    "granite_swa": {"sliding_window": 4, "layer_types": BOTH},
    "granitemoe_swa": {"sliding_window": 4, "layer_types": BOTH, **EXPERTS},
    "mimo_v2_flash": {},
    "vaultgemma": {"sliding_window": 4, "query_pre_attn_scalar": 10},
}


@pytest.fixture
def ids():
    return torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(1))


def padded(ids, side):
    """The attention mask, or None without padding."""
    if side == "none":
        return None
    mask = torch.ones_like(ids)
    mask[0, slice(0, 3) if side == "left" else slice(-3, None)] = 0
    return mask


def logits(model, name, ids, mask, **kwargs):
    model.set_attn_implementation(name)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, **kwargs).logits
    return out if mask is None else out[mask.bool()]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", SHAPES)
def test_forward(build, relative, ids, kind, side):
    model = build(kind, **SHAPES[kind])
    mask = padded(ids, side)
    eager = logits(model, "eager", ids, mask)
    assert relative(logits(model, "polyattn", ids, mask), eager) < GATE


@pytest.mark.parametrize(
    "kind, cache, side",
    [
        *(("llama", None, "none"), ("llama", None, "left"), ("llama", "static", "none"), ("llama", "static", "left")),
        *(
            ("gemma2", None, "none"),
            ("gemma2", "static", "left"),
            ("gpt_oss", None, "left"),
            ("gpt_oss", "static", "none"),
        ),
    ],
)
def test_prefill_and_decode(build, relative, ids, kind, cache, side):
    model = build(kind, **SHAPES[kind])
    out = {}
    for name in ("eager", "polyattn"):
        model.set_attn_implementation(name)
        out[name] = model.generate(
            ids, attention_mask=padded(ids, side) if side == "left" else torch.ones_like(ids), max_new_tokens=4,
            do_sample=False, cache_implementation=cache, return_dict_in_generate=True, output_logits=True,
            disable_compile=True,
        )  # fmt: skip
    assert torch.equal(out["polyattn"].sequences, out["eager"].sequences)
    assert relative(torch.stack(out["polyattn"].logits), torch.stack(out["eager"].logits)) < GATE


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("kind", sorted(SHOWN))
def test_models_that_turn_sdpa_down_but_are_given_bool_masks(build, relative, ids, kind):
    model = build(kind, **{**SHAPES, **OTHERS}[kind])
    for side in ("none", "left"):
        mask = padded(ids, side)
        eager = logits(model, "eager", ids, mask)
        assert relative(logits(model, "polyattn", ids, mask), eager) < GATE


def test_models_not_made_for_sdpa_get_the_masks_of_eager(relative):
    # Its layers call themselves causal although they are not, and it turns SDPA down.
    config = transformers.SplinterConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
    )
    model = transformers.SplinterModel(config).eval()
    ids = torch.randint(3, 50, (1, 8))
    out = {}
    for name in ("eager", "polyattn"):
        model.set_attn_implementation(name)
        out[name] = model(ids).last_hidden_state
    assert relative(out["polyattn"], out["eager"]) < GATE


@pytest.mark.parametrize("kind", SHAPES)
def test_gradients(build, relative, ids, kind):
    model = build(kind, **SHAPES[kind])
    mask = padded(ids, "left")
    grads = {}
    for name in ("eager", "polyattn"):
        model.zero_grad()
        model.set_attn_implementation(name)
        model(ids, attention_mask=mask).logits[mask.bool()].square().mean().backward()
        grads[name] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert grads["polyattn"].keys() == grads["eager"].keys()
    assert kind != "gpt_oss" or any(n.endswith("sinks") and g.any() for n, g in grads["eager"].items())
    got, wanted = (torch.cat([g.flatten() for g in grads[name].values()]) for name in ("polyattn", "eager"))
    assert relative(got, wanted) < GATE


def test_t5_has_its_position_bias(relative, ids):
    config = transformers.T5Config(
        vocab_size=120, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(weight, std=2.0)
    mask = padded(ids, "right")
    out, grads = {}, {}
    for name in ("eager", "polyattn"):
        model.zero_grad()
        model.set_attn_implementation(name)
        out[name] = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5]).logits
        out[name].square().mean().backward()
        found = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
        grads[name] = found.clone()
    assert relative(out["polyattn"], out["eager"]) < GATE
    assert relative(grads["polyattn"], grads["eager"]) < GATE
    with torch.no_grad():
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.zero_()
        assert (
            relative(model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5]).logits, out["eager"])
            > 0.01
        )


def test_packed_sequences_do_not_see_each_other(build, relative, ids):
    model = build("llama")
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": 5,
        "max_length_k": 5,
        "position_ids": positions,
    }
    model.set_attn_implementation("polyattn")
    with torch.no_grad():
        together = model(ids[:1], **packed).logits
        # An all-ones mask keeps transformers from finding the borders in the positions: only cu_seq_lens has them.
        borders_by_length = model(ids[:1], attention_mask=torch.ones(1, 9), **packed).logits
        apart = torch.cat([model(ids[:1, :4]).logits, model(ids[:1, 4:]).logits], 1)
        merged = model(ids[:1]).logits
    assert relative(together, apart) < GATE
    assert relative(borders_by_length, apart) < GATE
    assert relative(merged, apart) > 0.01, "the control does not mix the sequences"


def test_a_model_with_shared_keys_cuts_its_queries_safely(relative, ids):
    """Gemma 4 slices queries off once its masks are made; only a mask that exists can be sliced with them."""
    text = getattr(transformers, "Gemma4TextConfig", None)
    if text is None:
        pytest.skip("not run: Gemma 4 (this transformers has none)")
    config = text(
        vocab_size=120, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, global_head_dim=16, num_kv_shared_layers=2, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2, vocab_size_per_layer_input=120,
        hidden_size_per_layer_input=8, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(config).eval()
    for cache in (None, transformers.StaticCache(config, max_cache_len=16)):
        out = {}
        for name in ("eager", "polyattn"):
            model.set_attn_implementation(name)
            with torch.no_grad():
                own = copy.deepcopy(cache)
                out[name] = model(ids, logits_to_keep=3, past_key_values=own, use_cache=own is not None).logits
        assert relative(out["polyattn"], out["eager"]) < GATE


def test_pinned_names_and_scopes_reach_the_layers(build, ids):
    model = build("llama")

    def served(name):
        model.set_attn_implementation(name)
        return {(line.layer, line.selection.backend, line.selection.source) for line in host.report(model, ids)}

    layers = [f"model.layers.{i}.self_attn" for i in range(2)]
    assert served("polyattn|reference") == {(layer, "reference", "argument") for layer in layers}
    with polyattn.use_backend("reference"):
        assert served("polyattn") == {(layer, "reference", "use_backend") for layer in layers}
        assert served("polyattn|torch_sdpa") == {(layer, "torch_sdpa", "argument") for layer in layers}
    polyattn.configure(component_attention_backends="text_encoder=reference")
    with polyattn.component("text_encoder"):
        assert served("polyattn") == {(layer, "reference", "component text_encoder") for layer in layers}
    assert {backend for _, backend, _ in served("polyattn")} == {"torch_sdpa"}
    polyattn.check_components()


def test_parts_of_a_model_have_names_of_their_own(relative):
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(vocab_size=120, **size),
        vision_config=transformers.CLIPVisionConfig(image_size=8, patch_size=4, **size),
        image_token_index=110, vision_feature_layer=-1,
    )  # fmt: skip
    ids, pixels = torch.tensor([[5, *[110] * 4, 6, 7]]), torch.randn(1, 3, 8, 8)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    out = {}

    def served(name):
        model.set_attn_implementation("eager")
        model.set_attn_implementation(name)
        out[str(name)] = model(ids, pixel_values=pixels).logits
        assert relative(out[str(name)], out["eager"]) < GATE
        lines = host.report(model, ids, pixel_values=pixels)
        return {(line.layer.split(".")[1], line.selection.backend) for line in lines}

    model.set_attn_implementation("eager")
    out["eager"] = model(ids, pixel_values=pixels).logits
    both = {("vision_tower", "reference"), ("language_model", "torch_sdpa")}
    assert served({"text_config": "polyattn", "vision_config": "polyattn|reference"}) == both
    assert served({"": "polyattn", "vision_config": "polyattn|reference"}) == {("vision_tower", "reference")}
    assert served("polyattn|reference") == {("vision_tower", "reference"), ("language_model", "reference")}


def test_a_pinned_backend_that_cannot_serve_refuses(build, ids):
    model = build("gemma2", **SHAPES["gemma2"])
    model.set_attn_implementation("polyattn|torch_sdpa")
    with pytest.raises(polyattn.UnsupportedRequestError, match=r"torch_sdpa.*softcap"):
        model(ids)


def test_a_pinned_backend_that_is_not_here_says_so(build, ids, installed):
    if "polyattn|fa" not in installed:
        pytest.skip("not run: a backend of another machine (no plugin that brings fa is installed)")
    model = build("llama")
    model.set_attn_implementation("polyattn|fa")
    with pytest.raises(polyattn.BackendUnavailableError, match=r"fa, asked for by argument|'fa'"):
        model(ids)


def test_a_backend_without_dense_attention_is_reached_by_a_rewrite_or_refuses_by_itself(
    build, ids, relative, monkeypatch
):
    # A class of another test may have this config and have been given float masks, which no rewrite takes away.
    monkeypatch.delitem(registry._trust, transformers.LlamaConfig, raising=False)
    model = build("llama")
    with torch.no_grad():
        eager = model(ids).logits
        model.set_attn_implementation("polyattn|torch_native")
        assert relative(model(ids).logits, eager) < GATE
        assert {line.selection.backend for line in host.report(model, ids)} == {"torch_native"}
        model.set_attn_implementation("polyattn|dsa")
        with pytest.raises(polyattn.PolyattnError, match=r"dsa, asked for by argument, cannot serve .*is not mla"):
            model(ids)


def test_report_names_each_layer_and_why(build, ids):
    model = build("gpt_oss", **SHAPES["gpt_oss"])
    model.set_attn_implementation("polyattn")
    lines = host.report(model, ids, attention_mask=padded(ids, "left"))
    assert [line.layer for line in lines] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(line.selection.request.sinks for line in lines)
    assert "flex_attention" in {*lines[0].selection.rejected, *lines[0].selection.others}
    assert str(lines[0]).startswith("model.layers.0.self_attn (GptOssAttention, polyattn): torch_sdpa@cpu by ")
    assert torch.equal(logits(model, "polyattn", ids, None), logits(model, "polyattn", ids, None))


def test_report_of_a_model_that_polyattn_does_not_serve(build, ids):
    model = build("llama")
    with pytest.raises(polyattn.ConfigError, match=r"no attention call of LlamaForCausalLM .*'eager'.*set_attn_impl"):
        host.report(model, ids)
    host.uninstall()
    with pytest.raises(polyattn.ConfigError, match=r"call polyattn\.integrations\.transformers\.install"):
        host.report(model, ids)
    host.install()


@pytest.mark.parametrize("images", [5, 9, 11])
def test_mllama_sees_its_whole_image_where_no_cross_attention_mask_says_otherwise(relative, ids, images):
    config = transformers.MllamaConfig().text_config.__class__(
        vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, cross_attention_layers=[1], pad_token_id=0, bos_token_id=1, eos_token_id=2,
        max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = rough(transformers.MllamaForCausalLM(config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate"):
                weight.fill_(1.0)
    seen = torch.randn(2, images, 32, generator=torch.Generator().manual_seed(2))
    out = {}
    for name in ("eager", "polyattn"):
        model.set_attn_implementation(name)
        out[name] = model(ids, cross_attention_states=seen, use_cache=False).logits
    assert relative(out["polyattn"], out["eager"]) < GATE
