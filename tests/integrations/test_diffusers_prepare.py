"""`prepare` and `report`: pipelines of many families, overrides by component, role, step, layer and branch, errors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import polyattn
from polyattn.errors import BackendUnavailableError, ConfigError, InvalidInputError, PolyattnError
from polyattn.integrations import transformers as text_host

pytest.importorskip("diffusers")
pytest.importorskip("accelerate")
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models import attention_dispatch

from polyattn.integrations import diffusers as host
from polyattn.integrations.diffusers.families import FAMILIES
from polyattn.integrations.diffusers.rules import read_rules

from .tiny_pipelines import PIPELINES, frames, tiny

REGISTRY = attention_dispatch._AttentionBackendRegistry
SPARSE: dict[str, Any] = {"sparsity": 0.5, "coarse": "off"}
LARGE = {"height": 96, "width": 96}
"""Frames of more than one tile of a sparse method."""
BLOCKS = {"wan": 3, "wan22": 3, "flux": 4, "hunyuan": 4}
CROSS = {"wan", "wan22", "ltx", "ltx2", "pixart"}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    host.uninstall()
    polyattn.configure()


def rows(report: Any, **wanted: Any) -> list[Any]:
    return [row for row in report.rows if all(getattr(row, name) == value for name, value in wanted.items())]


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("name", PIPELINES)
def test_exact_backends_make_the_frames_that_diffusers_makes(name):
    pipe = tiny(name)
    native = frames(pipe, name)
    active = REGISTRY._active_backend
    done = host.prepare(pipe, {"transformer": "reference"})
    assert REGISTRY._active_backend is active
    found = frames(pipe, name)
    torch.testing.assert_close(found, native, atol=1e-4 * native.abs().max().item(), rtol=0)
    assert not torch.equal(found, native)
    report = host.report(pipe)
    told = [row for row in report.rows if row.component == "transformer"]
    assert {row.backend for row in told} == {"reference@cpu"}
    assert {row.role for row in told} == ({"self", "cross"} if name in CROSS else {"self"})
    (layers,) = {row.layers for row in told if row.layers}
    assert layers == tuple(range(BLOCKS.get(name, 2)))
    done.remove()
    done.remove()
    assert torch.equal(frames(pipe, name), native)
    models = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    modules = [module for part in models for module in part.modules()]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)
    assert not [key for key in pipe.transformer.state_dict() if "polyattn" in key]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in ("wan22", "cogvideox", "mochi")])
def test_a_sparse_method_serves_the_video_and_nothing_else(name):
    pipe = tiny(name)
    size = {} if name in ("flux", "sd3", "pixart") else LARGE
    size = {"height": 128, "width": 128} if name == "qwen" else size
    native = frames(pipe, name, **size)
    host.prepare(pipe, {"transformer": "video_sparse_attn"}, SPARSE)
    found = frames(pipe, name, **size)
    assert (found - native).abs().max() > 1e-3 * native.abs().max()
    report = host.report(pipe)
    served = rows(report, component="transformer", method="video_sparse_attn", role="self")
    assert {layer for row in served for layer in row.layers} == set(range(BLOCKS.get(name, 2)))
    assert all(row.density < 0.8 and "block_sparse: torch_sdpa@cpu" in row.backend for row in served)
    crossed = rows(report, role="cross", component="transformer")
    assert bool(crossed) == (name in CROSS)
    assert all("left dense by a rule" in row.backend for row in crossed if row.layers)


@pytest.mark.parametrize("name", ["cogvideox", "mochi", "hunyuan"])
def test_a_method_that_keeps_all_is_dense_attention_with_text_beside_the_video(name):
    pipe = tiny(name)
    native = frames(pipe, name)
    host.prepare(pipe, {"transformer": "video_sparse_attn"}, {"sparsity": 0.0, "coarse": "off"})
    found = frames(pipe, name)
    torch.testing.assert_close(found, native, atol=1e-4 * native.abs().max().item(), rtol=0)
    assert rows(host.report(pipe), method="video_sparse_attn", density=1.0)


def test_steps_layers_branches_and_roles_have_backends_of_their_own():
    pipe = tiny("wan")
    rules = {"steps": {"2-3": "reference"}, "layers": {"-1": "flex_attention"}, "branches": {"uncond": "torch_native"}}
    host.prepare(pipe, {"transformer": "torch_sdpa", "transformer.cross": "reference"}, {"transformer": rules})
    frames(pipe, "wan", num_inference_steps=4)
    part = next(part for part in host.components.prepared(pipe).parts if part.name == "transformer")
    calls = {(layer, role, backend): told.calls for (layer, role, backend, _), told in part.told.items()}
    expected: dict[tuple[int, str, str], int] = {}
    for step in range(4):
        for branch in ("cond", "uncond"):
            for layer in range(3):
                for role in ("self", "cross"):
                    name = "reference" if role == "cross" else "torch_sdpa"
                    name = "torch_native" if branch == "uncond" else name
                    name = "flex_attention" if layer == 2 else name
                    name = "reference" if step >= 2 else name
                    key = layer, role, name
                    expected[key] = expected.get(key, 0) + 1
    assert calls == expected


def test_wan_22_has_two_transformers_and_one_count_of_steps():
    pipe = tiny("wan22")
    host.prepare(pipe, {"transformer": "reference"}, {"transformer_2": {"default": "flex_attention"}})
    frames(pipe, "wan22", num_inference_steps=4)
    report = host.report(pipe)
    assert {row.backend for row in rows(report, component="transformer")} == {"reference@cpu"}
    assert {row.backend for row in rows(report, component="transformer_2")} == {"flex_attention@cpu"}
    first, second = (next(p for p in host.components.prepared(pipe).parts if p.name == n)
                     for n in ("transformer", "transformer_2"))  # fmt: skip
    assert first.run.steps == second.run.steps == 4
    assert sum(told.calls for told in first.told.values()) + sum(told.calls for told in second.told.values()) == 4 * 12


def test_a_rule_speaks_of_steps_of_the_pipeline_not_of_its_component():
    pipe = tiny("wan22")
    host.prepare(pipe, None, {"transformer_2": {"steps": {"3": "reference"}}})
    frames(pipe, "wan22", num_inference_steps=4)
    told = rows(host.report(pipe), component="transformer_2", backend="reference@cpu")
    assert sum(row.calls for row in told) == 12  # the last step: two branches of three blocks, each with two layers


def test_text_encoders_are_models_of_transformers():
    pipe = tiny("wan")
    words = {"prompt": "a cat", "negative_prompt": "", "prompt_embeds": None, "negative_prompt_embeds": None}
    native = frames(pipe, "wan", **words)
    host.prepare(pipe, {"text_encoder": "reference", "transformer": "torch_sdpa"})
    assert pipe.text_encoder.config._attn_implementation == "polyattn"
    found = frames(pipe, "wan", **words)
    torch.testing.assert_close(found, native, atol=1e-4 * native.abs().max().item(), rtol=0)
    assert not torch.equal(found, native)
    host.components.prepared(pipe).remove()
    assert pipe.text_encoder.config._attn_implementation == "sdpa"
    assert torch.equal(frames(pipe, "wan", **words), native)


def test_overrides_of_the_process_reach_components_by_their_names():
    pipe = tiny("wan")
    polyattn.configure(component_attention_backends="transformer=flex_attention,transformer.cross=reference")
    host.prepare(pipe)
    frames(pipe, "wan")
    report = host.report(pipe)
    assert {(row.role, row.backend, row.source) for row in report.rows} == {
        ("self", "flex_attention@cpu", "component transformer"),
        ("cross", "reference@cpu", "component transformer.cross"),
    }
    polyattn.selection.overrides.check_components()


def test_the_order_of_precedence():
    pipe = tiny("wan")
    polyattn.configure(attention_backend="torch_native")
    host.prepare(pipe, {"transformer.cross": "flex_attention"})
    frames(pipe, "wan")
    found = {(row.role, row.backend) for row in host.report(pipe).rows}
    assert found == {("self", "torch_native@cpu"), ("cross", "flex_attention@cpu")}
    with polyattn.use_backend("reference"):
        frames(pipe, "wan")
    assert {row.backend for row in host.report(pipe).rows} == {"reference@cpu"}
    polyattn.force_backend("torch_sdpa")
    try:
        frames(pipe, "wan")
        assert {row.backend for row in host.report(pipe).rows} == {"torch_sdpa@cpu"}
    finally:
        polyattn.force_backend(None)


def test_a_backend_of_diffusers_is_given_to_diffusers():
    pipe = tiny("wan")
    active = REGISTRY._active_backend
    done = host.prepare(pipe, {"transformer": "_native_math"})
    assert pipe.transformer.blocks[0].attn1.processor._attention_backend.value == "_native_math"
    assert REGISTRY._active_backend is active
    assert next(one for one in done.components if one.name == "transformer").served is False
    with pytest.raises(ConfigError, match="no call of the pipeline has reached polyattn yet"):
        host.report(pipe)
    done.remove()
    assert pipe.transformer.blocks[0].attn1.processor._attention_backend is None


@pytest.mark.parametrize(
    ("name", "package"),
    [("flash", "flash-attn"), ("_flash_3_hub", "kernels"), ("sage", "sageattention"), ("xformers", "xformers")],
)
def test_a_backend_of_diffusers_whose_library_is_missing_says_what_to_install(name, package, monkeypatch):
    for flag in ("_CAN_USE_FLASH_ATTN", "_CAN_USE_SAGE_ATTN", "_CAN_USE_XFORMERS_ATTN"):
        monkeypatch.setattr(attention_dispatch, flag, False)
    monkeypatch.setattr(attention_dispatch, "is_kernels_available", lambda: False)
    pipe = tiny("wan")
    said = f"'{name}' cannot .*WanTransformer.*install .*{package}.*`polyattn list`"
    with pytest.raises(BackendUnavailableError, match=said):
        host.prepare(pipe, {"transformer": name})
    assert pipe.transformer.blocks[0].attn1.processor._attention_backend is None


def test_preparing_again_replaces_what_was_prepared():
    pipe = tiny("wan")
    host.prepare(pipe, {"transformer": "reference"})
    host.prepare(pipe, {"transformer": "flex_attention"})
    run = {"prompt": "a cat", "height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 1}
    report = host.report(pipe, **run, output_type="latent")
    assert {row.backend for row in report.rows} == {"flex_attention@cpu"}
    assert "transformer self, layers 0-2: 6 calls, flex_attention@cpu by prepare()" in str(report)
    assert report.to_dict()["rows"][0]["component"] == "transformer"


def test_a_scheduler_that_is_changed_after_prepare_is_followed():
    from diffusers import UniPCMultistepScheduler

    pipe = tiny("wan")
    host.prepare(pipe, None, {"transformer": {"steps": {"1": "reference"}}})
    pipe.scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    frames(pipe, "wan")
    assert sum(row.calls for row in rows(host.report(pipe), backend="reference@cpu")) == 12


def test_a_copy_of_the_scheduler_is_its_own_and_saves_as_before(tmp_path):
    pipe = tiny("wan")
    kind = type(pipe.scheduler)
    done = host.prepare(pipe)
    pipe.scheduler.set_timesteps(4)
    copied = copy.deepcopy(pipe.scheduler)
    sample = torch.ones(1)
    copied.step(sample, copied.timesteps[0], sample)
    assert pipe.scheduler.step_index is None, "the copy steps for itself"
    assert host.components.prepared(pipe).parts[0].denoising.step == 0
    pipe.scheduler.save_pretrained(tmp_path)
    assert type(kind.from_pretrained(tmp_path)) is kind
    done.remove()
    assert type(pipe.scheduler) is kind


def test_a_copy_of_a_model_runs_as_the_model_does():
    pipe = tiny("wan")
    host.prepare(pipe, {"transformer": "reference"})
    wanted = frames(pipe, "wan")
    pipe.transformer = copy.deepcopy(pipe.transformer)
    assert torch.equal(frames(pipe, "wan"), wanted)


def test_connectors_are_a_component():
    pipe = tiny("ltx2")
    host.prepare(pipe, {"connectors": "reference"})
    frames(pipe, "ltx2")
    assert {row.backend for row in rows(host.report(pipe), component="connectors")} == {"reference@cpu"}
    aside = rows(host.report(pipe), component="transformer", layers=())
    assert sum(row.calls for row in aside) == 16, "sound has no place"
    before = [(row.component, row.calls) for row in host.report(pipe).rows]
    frames(pipe, "ltx2")
    assert [(row.component, row.calls) for row in host.report(pipe).rows] == before, "of the last run alone"


def test_an_error_in_a_layer_leaves_nothing_behind():
    from polyattn.integrations.diffusers.places import HERE

    pipe = tiny("wan")
    host.prepare(pipe, {"transformer": "torch_sdpa"})
    block = pipe.transformer.blocks[1]
    own, block.attn1.to_out = block.attn1.to_out, torch.nn.ModuleList()
    with pytest.raises(IndexError):
        frames(pipe, "wan")
    assert (HERE.part, HERE.layer, HERE.role) == (None, None, "")
    block.attn1.to_out = own
    frames(pipe, "wan")


def refused(match: str, components: Any = None, config: Any = None, name: str = "wan", kind: Any = ConfigError) -> None:
    pipe = tiny(name)
    with pytest.raises(kind, match=match):
        host.prepare(pipe, components, config)
    assert pipe.transformer.blocks[0].attn1.processor._attention_backend is None
    assert not pipe.transformer._forward_pre_hooks
    assert type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler


@pytest.mark.parametrize(
    ("match", "components", "config"),
    [
        (r"no component 'transfomer'\. Did you mean 'transformer'", {"transfomer": "torch_sdpa"}, None),
        (r"no role 'crss'\. Did you mean 'cross'", {"transformer.crss": "torch_sdpa"}, None),
        (r"no backend is named 'torch_sdp'.*asked for transformer\..*Did you mean", {"transformer": "torch_sdp"}, None),
        (r"override of scheduler reaches no layer: it is Flow", {"scheduler": "torch_sdpa"}, None),
        (r"override of vae reaches no layer: it has no attention layer of diffusers", {"vae": "torch_sdpa"}, None),
        (r"'_native_math' is a backend of diffusers, which serves transformer as a whole",
         {"transformer": "_native_math", "transformer.cross": "torch_sdpa"}, None),
        (r"'_native_math' is a backend of diffusers, and text_encoder", {"text_encoder": "_native_math"}, None),
        (r"rules of text_encoder are by steps", None, {"text_encoder": {"steps": {"0": "torch_sdpa"}}}),
        (r"have no key 'step'\. Did you mean 'steps'", None, {"transformer": {"step": {"0": "torch_sdpa"}}}),
        (r"transformer\.steps='torch_sdpa' is no mapping", None, {"transformer": {"steps": "torch_sdpa"}}),
        (r"transformer\.steps '3-1': '3-1' is no number and no range", None,
         {"transformer": {"steps": {"3-1": "torch_sdpa"}}}),
        (r"rule of transformer for layers 3: torch_sdpa reaches no layer: .* has 3 blocks, numbered 0 to 2", None,
         {"transformer": {"layers": {"3": "torch_sdpa"}}}),
        (r"names 7 for its backend", None, {"transformer": {"layers": {"1": 7}}}),
        (r"name a default of transformer twice", {"transformer": "torch_sdpa"},
         {"transformer": {"default": "reference"}}),
        (r"name transformer\.cross twice", {"transformer.cross": "torch_sdpa"},
         {"transformer": {"roles": {"cross": "reference"}}}),
        (r"gives sparsity, and sla_attn and video_sparse_attn are named and have options",
         {"transformer": "video_sparse_attn", "transformer.cross": "sla_attn"}, {"sparsity": 0.5}),
        (r"components=3 is a int; give a mapping", 3, None),
        (r"rule of transformer names 3 for its backend", None, {"transformer": 3}),
    ],
)  # fmt: skip
def test_wrong_overrides_are_refused_before_anything_is_changed(match, components, config):
    refused(match, components, config)


def test_wrong_options_and_places_are_refused_before_the_first_step():
    pipe = tiny("wan")
    host.prepare(pipe, {"transformer": "video_sparse_attn"}, {"sparsty": 0.5})
    with pytest.raises(ConfigError, match=r"no option 'sparsty'\. Did you mean 'sparsity'"):
        frames(pipe, "wan")
    host.prepare(pipe, {"transformer": "vmoba_attn"})
    with pytest.raises(PolyattnError, match="temporal_chunk_size"):
        frames(pipe, "wan")


def test_a_method_needs_a_model_whose_grid_is_known(monkeypatch):
    monkeypatch.delitem(FAMILIES, "WanTransformer3DModel")
    refused(r"vmoba_attn needs the grid of the tokens of transformer", {"transformer": "vmoba_attn"})


def test_overrides_that_reach_nothing_are_an_error_at_the_first_step():
    pipe = tiny("flux")
    host.prepare(pipe, {"transformer.cross": "reference"})
    with pytest.raises(ConfigError, match=r"transformer\.cross=reference reached no layer: .* have the role self"):
        frames(pipe, "flux")
    pipe = tiny("wan")
    host.prepare(pipe, None, {"transformer": {"steps": {"2-3": "reference"}}})
    with pytest.raises(ConfigError, match=r"steps 2-3: reference reaches no step: the pipeline makes 2, numbered"):
        frames(pipe, "wan")


def test_report_needs_a_prepared_pipeline_that_ran():
    pipe = tiny("wan")
    with pytest.raises(ConfigError, match="report\\(\\) needs a prepared pipeline"):
        host.report(pipe)
    host.prepare(pipe)
    with pytest.raises(ConfigError, match="no call of the pipeline has reached polyattn yet"):
        host.report(pipe)


def test_rules_by_number():
    rules = read_rules("transformer", {"default": "a", "steps": {"0-1,-1": "b"}, "layers": {"2": "c"}})
    at = {"steps": 10, "layers": 4, "branch": "", "role": "self"}
    found = [rules.pick(step=step, layer=0, **at) for step in range(10)]
    assert found == ["b", "b", *"aaaaaaa", "b"]
    assert rules.pick(step=5, layer=2, **at) == "c"
    assert rules.pick(step=0, layer=2, **at) == "b"
    assert rules.pick(step=None, layer=None, **{**at, "steps": None}) == "a"
    assert read_rules("transformer", "a").backends() == ("a",)


def test_installing_is_part_of_preparing():
    assert not host.installed()
    host.prepare(tiny("pixart"))
    assert "polyattn" in host.installed()
    assert "polyattn" in text_host.installed()


def test_heads_that_do_not_fit_are_told():
    host.install()
    query, key = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 3, 8)
    with pytest.raises(InvalidInputError, match="query has 4 heads, key and value 3"):
        attention_dispatch.dispatch_attention_fn(
            query, key, key, enable_gqa=True, backend=attention_dispatch.AttentionBackendName("polyattn")
        )
