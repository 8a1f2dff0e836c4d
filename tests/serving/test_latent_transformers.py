"""DeepSeek-shaped modules of transformers with their forward replaced: same hidden states; what cannot be, refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyattn.errors import ConfigError, InvalidInputError, UnsupportedRequestError
from polyattn.integrations.transformers.latent import latent_modules, replaced
from polyattn.semantics import reference
from polyattn.serving import AttentionLayer
from polyattn.serving.mla import expand, softmax_scale, split_kv_b

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import AttentionMaskInterface  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Wide weights: attention far from a plain average, so that scale and rotation show.
    "initializer_range": 0.3,
}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "v3": ("deepseek_v3", {}, "pairs_to_halves"),
    "v3-no-q-lora": ("deepseek_v3", {"q_lora_rank": None}, "pairs_to_halves"),
    "v3-halves": ("deepseek_v3", {"rope_interleave": False}, "halves"),
    "v3-yarn": ("deepseek_v3", {"rope_parameters": YARN}, "pairs_to_halves"),
    "v3-yarn-halves-no-q-lora": (
        "deepseek_v3",
        {"rope_parameters": YARN, "rope_interleave": False, "q_lora_rank": None},
        "halves",
    ),
    "v2": ("deepseek_v2", {}, "complex_pairs"),
    "v2-yarn-no-q-lora": ("deepseek_v2", {"rope_parameters": YARN, "q_lora_rank": None}, "complex_pairs"),
    "minicpm3": ("minicpm3", {}, "halves"),
    "youtu": ("youtu", {}, "pairs_to_halves"),
}
# The models' own softmax and norms are in float32 whatever their dtype.
EXACT = {torch.float64: 1e-6, torch.float32: 2e-5}
SERVED = "latent_served"


def build(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"not run: {kind} (transformers {transformers.__version__} has none)")
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config, attn_implementation="eager").to(dtype).eval()


@pytest.fixture
def maskless() -> Iterator[Callable[[Any], None]]:
    """Give a model an attention implementation without masks, whose function nobody may reach."""

    def unreached(*_: Any, **__: Any) -> Any:
        raise AssertionError("the forward of every attention module is replaced")

    AttentionInterface.register(SERVED, unreached)
    AttentionMaskInterface.register(SERVED, lambda *_, **__: None)
    yield lambda model: model.set_attn_implementation(SERVED)
    del AttentionInterface._global_mapping[SERVED], AttentionMaskInterface._global_mapping[SERVED]


class Kept:
    """A latent forward over rows that are kept in a list by layer: one sequence, from the definition."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}

    def forward(self, module: Any, q_nope: Tensor, q_pe: Tensor, rows: Tensor, layer: AttentionLayer) -> Tensor:
        kept = torch.cat([self.rows.get(layer.layer_id, rows[:0]), rows])
        self.rows[layer.layer_id] = kept
        up = split_kv_b(module.kv_b_proj.weight, q_nope.shape[-1], module.v_head_dim)
        keys = (t[None] for t in expand(kept, up))
        query = torch.cat([q_nope, q_pe], -1)[None]
        return reference.attention(query, *keys, causal="bottom_right", scale=layer.scale)[0]


def far(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


# Same hidden states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(EXACT), ids=["fp64", "fp32"])
@torch.no_grad()
def test_hidden_states_are_the_models_own(shape, dtype, maskless):
    kind, changes, rotation = SHAPES[shape]
    if dtype == torch.float64:
        changes = {**changes, "first_k_dense_replace": 2}  # the experts' grouped product takes 32 bits at most
    model = build(kind, dtype, **changes)
    tokens = torch.randint(3, 97, (1, 14), generator=torch.Generator().manual_seed(1))
    cache = transformers.DynamicCache()
    wanted = [model(tokens[:, :11], past_key_values=cache, use_cache=True)[0]]
    wanted += [model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True)[0] for i in (11, 12, 13)]
    maskless(model)
    with replaced(model, Kept().forward) as ours:
        assert {entry.rope for entry in ours.modules} == {rotation}
        steps = [slice(0, 11), slice(11, 12), slice(12, 13), slice(13, 14)]
        for step, theirs in zip(steps, wanted, strict=True):
            places = torch.arange(14)[None, step]
            got = model(tokens[:, step], position_ids=places, use_cache=False)[0]
            assert far(got, theirs) < EXACT[dtype]


@pytest.mark.parametrize("wrong", [20**-0.5, 12**-0.5], ids=["of the latent row", "without mscale"])
@torch.no_grad()
def test_the_comparison_sees_a_wrong_scale(wrong, maskless):
    model = build("deepseek_v3", rope_parameters=YARN)
    tokens = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    own = model(tokens, use_cache=False)[0]
    maskless(model)
    kept = Kept()

    def scaled(module: Any, q_nope: Tensor, q_pe: Tensor, rows: Tensor, layer: AttentionLayer) -> Tensor:
        return kept.forward(module, q_nope, q_pe, rows, dataclasses.replace(layer, scale=wrong))

    with replaced(model, scaled):
        assert far(model(tokens, use_cache=False)[0], own) > 1e-2


@pytest.mark.parametrize("rope", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_the_scale_is_the_modules_own(kind, rope):
    model = build(kind, **({"rope_parameters": rope} if rope else {}))
    wanted = softmax_scale(8, 4, model.config.rope_parameters)
    assert wanted == pytest.approx(12**-0.5 * ((0.1 * 0.8 * 1.3862943611198906 + 1) ** 2 if rope else 1))
    for entry in latent_modules(model):
        assert entry.layer.scale == entry.module.scaling == pytest.approx(wanted, rel=1e-15)


def test_what_was_replaced_is_said_and_taken_back():
    model = build("deepseek_v3")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with replaced(model, Kept().forward) as ours:
        assert [entry.name for entry in ours.modules] == ["layers.0.self_attn", "layers.1.self_attn"]
        assert str(ours).splitlines()[1] == (
            "layers.1.self_attn (DeepseekV3Attention): 4 heads on rows of 16 + 4, rotation pairs_to_halves, "
            "scale 0.288675"
        )
        assert [(layer.layer_id, layer.heads, layer.kv_heads) for layer in ours.layers] == [(0, 4, 1), (1, 4, 1)]
        assert all((layer.latent, layer.dims) == (True, (20, 16)) for layer in ours.layers)
        assert vars(model.layers[0].self_attn)["forward"].__name__ == "polyattn_latent_forward"
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    ours.restore()  # twice does no harm
    assert model.config._attn_implementation == "eager"


def test_it_is_taken_back_after_an_error():
    model = build("deepseek_v3")
    with pytest.raises(ZeroDivisionError), replaced(model, Kept().forward):
        raise ZeroDivisionError
    assert "forward" not in vars(model.layers[0].self_attn)


def test_a_forward_that_somebody_replaced_since_stays():
    model = build("deepseek_v3")
    ours = replaced(model, Kept().forward)
    model.layers[0].self_attn.forward = len
    with pytest.raises(ConfigError, match=r"forward of layers\.0\.self_attn was replaced by somebody else .* opposite"):
        ours.restore()
    assert model.layers[0].self_attn.forward is len
    assert "forward" not in vars(model.layers[1].self_attn)


# Calls that are refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, kind, said",
    [
        ({"position_embeddings": None}, InvalidInputError, "self_attn was called without position_embeddings"),
        ({"attention_mask": torch.ones(1)}, InvalidInputError, "attention_mask reached self_attn, .* no mask function"),
        ({"past_key_values": object()}, InvalidInputError, "past_key_values reached self_attn, .*use_cache=False"),
        ({"indices": 3}, UnsupportedRequestError, "indices reached self_attn, .*it may change the result"),
    ],
)
def test_a_call_that_brings_more_is_refused(given, kind, said):
    model = Holder(v3.DeepseekV3Attention)
    with replaced(model, Kept().forward), pytest.raises(kind, match=said):
        model(**given)


def test_keywords_that_say_nothing_about_attention_pass():
    model = Holder(v3.DeepseekV3Attention)
    plain = model()
    with replaced(model, Kept().forward):
        got = model(position_ids=torch.arange(3)[None], use_cache=False, output_attentions=None)
    assert far(got, plain) < 1e-5


# Modules that are refused ---------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """One attention module and its rotary embedding."""

    def __init__(self, kind: Any, *, rotary: Any = v3.DeepseekV3RotaryEmbedding, **changes: Any) -> None:
        super().__init__()
        config = transformers.DeepseekV3Config(**{**SIZES, **changes})
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        if rotary is not None:
            self.rotary_emb = rotary(config)
        self.self_attn = kind(config, 0)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3)
        self.requires_grad_(False).eval()

    def forward(self, **more: Any) -> Tensor:
        hidden = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(2))
        places = torch.arange(3)[None]
        mask = torch.full((3, 3), float("-inf")).triu(1)[None, None]
        own = {} if "forward" in vars(self.self_attn) else {"attention_mask": mask}
        given = {"position_embeddings": self.rotary_emb(hidden, places), **own, **more}
        return self.self_attn(hidden, **{"attention_mask": None, **given})[0]


def _refusal(model: nn.Module) -> str:
    with pytest.raises(UnsupportedRequestError) as caught:
        replaced(model, Kept().forward)
    assert not any("forward" in vars(m) and m.forward.__name__ == "polyattn_latent_forward" for m in model.modules())
    assert "Leave its forward as it is" in str(caught.value)
    return " ".join(reason for reasons in caught.value.rejected.values() for reason in reasons)


def _with(change: Callable[[Any], Any]) -> Holder:
    model = Holder(v3.DeepseekV3Attention)
    change(model.self_attn)
    return model


def _weight(make: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        module.kv_b_proj.weight = nn.Parameter(make(module.kv_b_proj.weight), requires_grad=False)

    return change


def _own_forward(module: Any) -> None:
    module.forward = _own_forward


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda m: delattr(m, "scaling"), "it has no scaling"),
        (lambda m: setattr(m, "kv_lora_rank", None), "it has no kv_lora_rank"),
        (lambda m: delattr(m, "kv_a_layernorm"), "it has no kv_a_layernorm"),
        (lambda m: delattr(m, "q_b_proj"), "it has no q_proj, or q_a_proj with"),
        (lambda m: setattr(m, "indexer", nn.Linear(2, 2)), "it also has indexer, of which latent attention knows"),
        (lambda m: m.register_parameter("sinks", nn.Parameter(torch.ones(4))), "it also has sinks, of which"),
        (lambda m: m.register_buffer("factor", torch.ones(4)), "it also has factor, of which"),
        (_own_forward, "its forward has been replaced already, by _own_forward"),
        (lambda m: m.train(), "it is in training mode; call model.eval()"),
        (lambda m: setattr(m.kv_b_proj, "bias", nn.Parameter(torch.ones(56))), "no matrix without a bias"),
        (lambda m: setattr(m, "kv_b_proj", nn.Identity()), "no matrix without a bias"),
        (_weight(lambda w: w.to("meta")), "weights are not loaded (device meta)"),
        (_weight(lambda w: w.to(torch.float8_e4m3fn)), "kv_b_proj is torch.float8_e4m3fn: dequantise it"),
        (_weight(lambda w: w[:-1]), "kv_b_proj is [55, 16], not [H * 14, 16]"),
        (_weight(lambda w: w[:, :-1]), "kv_b_proj is [56, 15], not [H * 14, 16]"),
        (lambda m: nn.init.zeros_(m.o_proj.weight), "its output is not what its parts make (relative distance nan)"),
    ],
)
def test_a_module_that_lacks_something_or_has_more_is_refused(change, said):
    assert said in _refusal(_with(change))


class NeedsPositionIds(v3.DeepseekV3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, position_ids, **more):
        raise AssertionError


class WithoutPositions(v3.DeepseekV3Attention):
    def forward(self, hidden_states, attention_mask, **more):
        raise AssertionError


class Fails(v3.DeepseekV3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, **more):
        raise RuntimeError("two tokens are too few")


class NeverAsks(v3.DeepseekV3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, **more):
        return hidden_states, None


class SaysMore(v3.DeepseekV3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, **more):
        return super().forward(hidden_states, position_embeddings, attention_mask, sliding_window=4)


class OtherScale(v3.DeepseekV3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, **more):
        before, self.scaling = self.scaling, 2 * self.scaling
        try:
            return super().forward(hidden_states, position_embeddings, attention_mask)
        finally:
            self.scaling = before


class Factor(v3.DeepseekV3Attention):
    """Longcat's: a factor on the queries that no attribute shows."""

    def forward(self, hidden_states, position_embeddings, attention_mask, **more):
        undo = self.q_b_proj.register_forward_hook(lambda *given: 1.5 * given[-1])
        try:
            return super().forward(hidden_states, position_embeddings, attention_mask)
        finally:
            undo.remove()


class NoRotationOfKeys(v3.DeepseekV3Attention):
    def expand_kv(self, kv_nope, k_rot):
        return super().expand_kv(kv_nope, k_rot.flip(-1))


class OtherValue(v3.DeepseekV3Attention):
    def expand_kv(self, kv_nope, k_rot):
        key, value = super().expand_kv(kv_nope, k_rot)
        return key, value.tanh()


class FewerHeads(v3.DeepseekV3Attention):
    def expand_kv(self, kv_nope, k_rot):
        key, value = super().expand_kv(kv_nope, k_rot)
        return key[:, :2], value


class Gated(v3.DeepseekV3Attention):
    """Bailing's, without a module for the gate: what comes after attention."""

    def forward(self, hidden_states, position_embeddings, attention_mask, **more):
        out, _ = super().forward(hidden_states, position_embeddings, attention_mask)
        return out * torch.sigmoid(hidden_states), None


@pytest.mark.parametrize(
    "kind, said",
    [
        (NeedsPositionIds, "its forward needs position_ids"),
        (WithoutPositions, "its forward takes no position_embeddings"),
        (Fails, "running it on two tokens fails: RuntimeError: two tokens are too few"),
        (NeverAsks, "its forward never asks transformers for an attention function"),
        (SaysMore, "it hands sliding_window to its attention function"),
        (OtherScale, "its scale is 0.577"),
        (Factor, "its query is not what its parts make (relative distance 0.33) (rotation halves)"),
        (NoRotationOfKeys, "its key is not what its parts make"),
        (OtherValue, "its value is not what its parts make"),
        (FewerHeads, "its key is [2, 2, 12], its parts make [2, 4, 12]"),
        (Gated, "its output is not what its parts make"),
    ],
)
def test_a_module_that_computes_something_else_is_refused(kind, said):
    assert said in _refusal(Holder(kind))


class OneTensor(v3.DeepseekV3RotaryEmbedding):
    def forward(self, x, position_ids):
        return torch.stack(super().forward(x, position_ids))


class TwoRotaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = Holder(v3.DeepseekV3Attention)
        self.attention, self.one, self.two = (
            inner.self_attn,
            inner.rotary_emb,
            Holder(v3.DeepseekV3Attention).rotary_emb,
        )


@pytest.mark.parametrize(
    "model, said",
    [
        (lambda: Holder(v3.DeepseekV3Attention, rotary=OneTensor), "its position embeddings are Tensor, for none of"),
        (lambda: Holder(v3.DeepseekV3Attention, rotary=None), "no module above it makes rotary positions"),
        (lambda: Holder(v3.DeepseekV3Attention).self_attn, "no module above it makes rotary positions"),
        (TwoRotaries, "several modules make positions for it (DeepseekV3RotaryEmbedding, DeepseekV3RotaryEmbedding)"),
    ],
)
def test_positions_that_are_not_known_are_refused(model, said):
    assert said in _refusal(model())


@pytest.mark.parametrize(
    "kind, changes, said",
    [
        # A factor on the latents, a gate: models that have DeepSeek's parts and do more with them.
        ("longcat_flash", {"head_dim": 4, "num_layers": 1}, "is not what its parts make"),
    ],
)
def test_models_that_do_more_are_refused(kind, changes, said):
    assert said in _refusal(build(kind, **changes))


def test_nothing_is_replaced_when_one_module_is_refused():
    model = build("deepseek_v3")
    model.layers[1].self_attn.indexer = nn.Linear(2, 2)
    assert "indexer" in _refusal(model)


def test_a_model_without_latent_attention_is_refused():
    with pytest.raises(UnsupportedRequestError, match=r"Linear has no latent attention .* serve it as it is"):
        replaced(nn.Linear(2, 2), Kept().forward)


def test_two_modules_with_one_number_are_refused():
    model = build("deepseek_v3")
    model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedRequestError, match=r"layers\.1\.self_attn of .* layer_idx 0 is that of an earlier"):
        replaced(model, Kept().forward)
