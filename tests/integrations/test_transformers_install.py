"""install and uninstall, the names transformers accepts, and models that a name must not be given to."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
from packaging.version import Version

import polyattn
from polyattn.contract import BackendInfo
from polyattn.integrations import transformers as host
from polyattn.integrations.common import names as common_names
from polyattn.integrations.transformers import names, registry
from polyattn.registry.manager import get_manager

pytestmark = pytest.mark.usefixtures("installed")
transformers = pytest.importorskip("transformers")
AttentionInterface = transformers.modeling_utils.AttentionInterface
AttentionMaskInterface = transformers.masking_utils.AttentionMaskInterface
PreTrainedModel = transformers.PreTrainedModel
sdpa_mask = transformers.masking_utils.sdpa_mask


def registered():
    return dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)


def test_naming_the_integration_imports_no_transformers():
    code = "import sys, polyattn; polyattn.integrations.transformers.install; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hosts_that_are_not_there():
    assert "transformers" in dir(polyattn.integrations)
    with pytest.raises(AttributeError, match=r"no attribute 'transformer'; hosts: .*transformers"):
        _ = polyattn.integrations.transformer


def test_names_are_in_both_registries(installed):
    functions, masks = registered()
    assert {"polyattn", "polyattn|torch_sdpa", "polyattn|flex_attention", "polyattn|reference"} <= set(installed)
    assert set(installed) <= functions.keys() & masks.keys()
    assert host.installed()["polyattn"] is None
    assert host.installed()["polyattn|torch_sdpa"] == "torch_sdpa"


def test_uninstall_leaves_transformers_as_it_was():
    host.uninstall()
    methods = ("get_correct_attn_implementation", "set_attn_implementation")
    before, own = registered(), [getattr(PreTrainedModel, method) for method in methods]
    host.install()
    host.install("other")
    host.install("sdpa")
    assert AttentionInterface._global_mapping["sdpa"] is not before[0]["sdpa"]
    assert AttentionMaskInterface._global_mapping["sdpa"] is sdpa_mask
    host.uninstall("other")
    assert "polyattn" in host.installed()
    assert "other" not in host.installed()
    host.uninstall()
    assert registered() == before
    assert [getattr(PreTrainedModel, method) for method in methods] == own
    host.uninstall()
    host.install()


def test_uninstall_keeps_what_others_put_there_since():
    host.uninstall()
    original = PreTrainedModel.get_correct_attn_implementation
    host.install()

    def theirs(*args, **kwargs):
        raise NotImplementedError

    AttentionInterface.register("polyattn", theirs)
    PreTrainedModel.get_correct_attn_implementation = theirs
    try:
        host.uninstall()
        assert AttentionInterface._global_mapping["polyattn"] is theirs
        assert PreTrainedModel.get_correct_attn_implementation is theirs
    finally:
        del AttentionInterface._global_mapping["polyattn"]
        PreTrainedModel.get_correct_attn_implementation = original
    host.install()


def test_installing_again_refreshes():
    first = AttentionInterface._global_mapping["polyattn"]
    assert host.install(harmless=["tilt"]) == host.install(harmless=["tilt"])
    assert AttentionInterface._global_mapping["polyattn"] is not first


@pytest.mark.parametrize(
    "name, reason",
    [
        ("polyattn_flash", "contains 'flash': .* no mask"),
        ("flash_attention_9", "contains 'flash'"),
        ("acme/fa3", "contains '/': .*Hub"),
        ("my_sdpa", r"contains 'sdpa': .*\(the whole name 'sdpa' is allowed\)"),
        ("flex_attention", "contains 'flex_attention'"),
        ("eager", "own word for its eager attention"),
        ("paged|polyattn", "own word"),
        ("", "must be a string"),
        (" polyattn", "without blanks"),
        (None, "must be a string"),
    ],
)
def test_names_that_transformers_reads_as_something_else(name, reason):
    with pytest.raises(
        polyattn.ConfigError, match=rf"install name .*{reason}.*; choose another name, for example 'polyattn'"
    ):
        host.install(name)


def test_a_name_that_is_taken():
    AttentionInterface.register("mine", sdpa_mask)
    try:
        with pytest.raises(
            polyattn.ConfigError, match=r"'mine' is already registered, by transformers\.masking_utils; choose"
        ):
            host.install("mine")
        assert AttentionInterface._global_mapping["mine"] is sdpa_mask
    finally:
        del AttentionInterface._global_mapping["mine"]


def test_harmless_is_a_list_of_words_that_are():
    with pytest.raises(
        polyattn.InvalidInputError, match=r"harmless='tilt' must be a list of keyword names: \['tilt'\]"
    ):
        host.install(harmless="tilt")
    with pytest.raises(polyattn.ConfigError, match="harmless names indices, softcap, which changes the result"):
        host.install(harmless=["softcap", "indices", "tilt"])


def test_uninstalling_what_is_not_there():
    with pytest.raises(
        polyattn.ConfigError, match=r"uninstall\('polyatn'\): .*Did you mean 'polyattn'\? Installed: polyattn"
    ):
        host.uninstall("polyatn")
    with pytest.raises(polyattn.ConfigError, match=r"uninstall\(3\): that name is not installed"):
        host.uninstall(3)


def test_transformers_missing_or_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        polyattn.BackendUnavailableError, match=r"not installed; pip install 'polyattn\[transformers\]'"
    ):
        registry.interfaces()
    monkeypatch.undo()
    for old in ("4.57.1", "5.3.0"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", old)
        with pytest.raises(polyattn.BackendUnavailableError, match=rf"{old} is installed, 5\.4 or newer .*install -U"):
            host.install("other")


def test_names_with_flash_in_them_are_not_pinned(monkeypatch):
    backends = {name: BackendInfo(name, "cpu", (), summary="fast") for name in ("fast", "flash_x")}
    monkeypatch.setattr(common_names, "get_manager", lambda: types.SimpleNamespace(backends=backends))
    assert names.pinned_names("polyattn") == {"polyattn|fast": "fast"}


def test_every_other_backend_is_pinned_whatever_it_is_for(installed):
    known = {info.name for info in get_manager().backends.values()}
    missing = known - {name.partition("|")[2] for name in installed}
    assert all("flash" in name for name in missing), missing
    assert {"polyattn|torch_native", "polyattn|dsa"} <= set(installed)


def test_aliases_are_pinned_too(installed):
    backends = {name.partition("|")[2] for name in installed}
    if "fa" not in backends:
        pytest.skip("not run: aliases (no plugin that brings fa is installed)")
    assert {"fa", "fa2", "fa3"} <= backends


ITS_OWN = ["BloomForCausalLM", "FalconForCausalLM"]
GPTJ = "GPTJForCausalLM"
SERVES_GPTJ = Version(transformers.__version__) >= Version("5.24")
"""transformers asks its registry for GPT-J's attention from here on."""


@pytest.mark.parametrize("kind", ITS_OWN if SERVES_GPTJ else [*ITS_OWN, GPTJ])
def test_models_with_attention_of_their_own_refuse_the_name(kind):
    model = getattr(transformers, kind)
    config = model.config_class(hidden_size=32, n_layer=1, n_head=4, vocab_size=50)
    config._attn_implementation = "polyattn"
    with pytest.raises(
        polyattn.UnsupportedRequestError,
        match=rf"'polyattn' cannot reach {kind}: it computes attention in its own code .*='eager'; .*'text_config'",
    ):
        model(config)


@pytest.mark.parametrize("kind", ["MPNet", "DebertaV2", "Bloom"])
def test_setting_the_name_on_models_it_cannot_reach_is_refused(kind):
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(
        polyattn.UnsupportedRequestError,
        match=rf"'polyattn' cannot reach {kind}Model: it computes attention in its own",
    ):
        model.set_attn_implementation("polyattn")
    assert model.config._attn_implementation == before
    model.set_attn_implementation("eager")
    with pytest.raises(
        polyattn.ConfigError, match=rf"no attention call of {kind}Model reached .*{kind}Model computes .*at .*='eager'"
    ):
        host.report(model, torch.tensor([[1, 2, 3]]))


OLD = Version(transformers.__version__) < Version("5.23")


def parts(**names):
    """A model of two towers, of which BLOOM cannot be reached, changed by these names."""
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.EncoderDecoderConfig(
        encoder=transformers.BloomConfig(**small).to_dict(), decoder=transformers.BertConfig(**small).to_dict()
    )
    model = torch.nn.Module.__new__(transformers.EncoderDecoderModel)
    torch.nn.Module.__init__(model)
    model.config = config
    model.encoder = transformers.BloomModel(config.encoder)
    model.decoder = transformers.BertModel(config.decoder)
    model.set_attn_implementation(names)
    return model


@pytest.mark.skipif(OLD, reason=f"not run: transformers {transformers.__version__} builds no such configuration")
def test_a_part_that_cannot_be_reached_keeps_eager():
    model = parts(decoder="polyattn", encoder="eager")
    assert model.decoder.config._attn_implementation == "polyattn"
    assert model.encoder.config._attn_implementation == "eager"
    with pytest.raises(polyattn.UnsupportedRequestError, match="'polyattn' cannot reach BloomModel"):
        parts(decoder="polyattn", encoder="polyattn")


@pytest.mark.skipif(OLD, reason=f"not run: transformers {transformers.__version__} cannot be asked about such a class")
def test_a_class_that_transformers_does_not_change_is_to_be_built_with_the_name(build):
    llama = type(build("llama"))
    # transformers remembers what it found about a class, for those that are made from it too.
    unread = type(
        "Unread", (llama,), {"__module__": "typed_into_a_shell", "_can_set_attn_implementation_cached_value": None}
    )
    model = unread(build("llama").config)
    with pytest.raises(
        polyattn.UnsupportedRequestError, match=r"'polyattn' cannot be set on Unread any more: .*Build or load it with"
    ):
        model.set_attn_implementation("polyattn")


@pytest.mark.parametrize("kind", ["MPNet", "Bert"])
def test_pins_of_backends_that_nobody_knows(kind):
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config)
    said = r"'polyattn\|torch_spda' is not installed: no backend .* Did you mean 'torch_sdpa'.*\? Known: .*use_backend"
    with pytest.raises(polyattn.ConfigError, match=said):
        model.set_attn_implementation("polyattn|torch_spda")
    config._attn_implementation = "polyattn|torch_spda"
    with pytest.raises(polyattn.ConfigError, match=said):
        getattr(transformers, f"{kind}Model")(config)


def test_a_report_of_a_model_without_attention():
    model = transformers.MambaModel(transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1))
    model.set_attn_implementation("polyattn")
    with pytest.raises(
        polyattn.ConfigError, match=r"is 'polyattn' already, .*ran no attention layer, or MambaModel has"
    ):
        host.report(model, torch.tensor([[1, 2, 3]]))


def test_attention_in_chunks_that_transformers_does_not_compute(build):
    config = build("qwen2").config
    config.dual_chunk_attention_config = {"chunk_size": 16}
    config._attn_implementation = "eager"
    model = transformers.Qwen2ForCausalLM(config)
    with pytest.raises(
        polyattn.UnsupportedRequestError, match=r"Qwen2ForCausalLM with dual_chunk_attention_config: .* = None first"
    ):
        model.set_attn_implementation("polyattn")
    config.dual_chunk_attention_config = None
    model.set_attn_implementation("polyattn")


@pytest.mark.skipif(not SERVES_GPTJ, reason=f"not run: transformers {transformers.__version__} is older than 5.24")
def test_gptj_is_served_where_transformers_asks_its_registry(relative):
    config = transformers.GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=50, n_positions=32)
    config._attn_implementation = "eager"
    model = transformers.GPTJForCausalLM(config).eval()
    ids = torch.randint(3, 50, (2, 9))
    eager = model(ids).logits
    model.set_attn_implementation("polyattn")
    assert {line.implementation for line in host.report(model, ids)} == {"polyattn"}
    assert relative(model(ids).logits, eager) < 1e-5


def test_a_model_class_of_ones_own_is_judged_by_its_parents(build):
    llama = type(build("llama"))
    config = build("llama").config
    config._attn_implementation = "polyattn"

    class Mine(llama):
        """The source of this module has no attention function in it."""

    assert Mine(config).config._attn_implementation == "polyattn"
    # Code that nobody can read has the benefit of the doubt.
    unread = type("Unread", (PreTrainedModel,), {"__module__": "typed_into_a_shell", "config_class": type(config)})
    assert unread(config).config._attn_implementation == "polyattn"


def test_taking_over_sdpa_serves_every_model(build, relative):
    model = build("llama")
    ids = torch.randint(3, 120, (2, 9))
    eager = model(ids).logits
    assert host.install("sdpa") == ("sdpa",)
    model.set_attn_implementation("sdpa")
    assert {line.implementation for line in host.report(model, ids)} == {"sdpa"}
    assert relative(model(ids).logits, eager) < 1e-5
    config = transformers.FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=50)
    config._attn_implementation = "sdpa"
    transformers.FalconForCausalLM(config)
