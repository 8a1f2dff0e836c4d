"""Vision attention: documents by themselves, in both directions, any head dim, by the backend asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import BackendUnavailableError, InvalidInputError
from polyattn.serving.attention.multimodal import multimodal, vision_attention

LENGTHS = (5, 1, 12, 7)


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    yield
    polyattn.configure()


def packed(head_dim: int, heads: int = 4, kv_heads: int = 4, v_head_dim: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(head_dim)
    total = sum(LENGTHS)
    query = torch.randn(total, heads, head_dim, generator=generator)
    key = torch.randn(total, kv_heads, head_dim, generator=generator)
    value = torch.randn(total, kv_heads, v_head_dim or head_dim, generator=generator)
    return query, key, value, torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)


def plain(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Each document by itself, in fp64."""
    found = []
    for q, k, v in zip(*(t.double().split(LENGTHS) for t in (query, key, value)), strict=True):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        logits = torch.einsum("ihd,jhd->hij", q, k) * (query.shape[-1] ** -0.5 if scale is None else scale)
        found.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1), v))
    return torch.cat(found)


def source(tensors: tuple[Tensor, ...]) -> tuple[str, str]:
    selection = polyattn.explain(vision_attention, *tensors, max(LENGTHS))
    return selection.backend, selection.source


@pytest.mark.parametrize("backend", [None, "torch_sdpa", "torch_native", "flex_attention", "reference"])
@pytest.mark.parametrize("head_dim", [72, 80, 64])
def test_documents_see_themselves_only(head_dim: int, backend: str | None) -> None:
    *tensors, cu = packed(head_dim)
    got = vision_attention(*tensors, cu, max(LENGTHS), backend=backend)
    torch.testing.assert_close(got, plain(*tensors).float(), atol=2e-6, rtol=1e-5)


def test_shared_heads_other_values_scale_and_out() -> None:
    *tensors, cu = packed(24, heads=4, kv_heads=2, v_head_dim=16)
    out = torch.empty(sum(LENGTHS), 4, 16)
    got = vision_attention(*tensors, cu, max(LENGTHS), scale=0.3, out=out)
    assert got is out
    torch.testing.assert_close(got, plain(*tensors, scale=0.3).float(), atol=2e-6, rtol=1e-5)


def test_the_platform_chooses_by_itself() -> None:
    backend, by = source(packed(72))
    assert backend != "reference"
    assert by in ("platform rule", "priority", "lowering")


def test_the_setting_is_for_towers_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensors = packed(72)
    polyattn.configure(attention_backend="torch_native", mm_attention_backend="flex_attention")
    assert source(tensors) == ("flex_attention", "configure()")
    *qkv, cu = tensors
    lens = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 12, "max_seqlen_k": 12}
    assert polyattn.explain(polyattn.varlen_attention, *qkv, **lens).backend == "torch_native"
    file = tmp_path / "polyattn.yaml"
    file.write_text("mm_attention_backend: flex_attention\n")
    monkeypatch.setenv("POLYATTN_CONFIG", str(file))
    polyattn.configure()
    assert source(tensors) == ("flex_attention", f"config file {file}")
    monkeypatch.delenv("POLYATTN_CONFIG")


def test_without_a_setting_of_its_own_a_tower_obeys_the_general_one() -> None:
    polyattn.configure(attention_backend="flex_attention")
    assert source(packed(72)) == ("flex_attention", "configure()")


@pytest.mark.parametrize(
    "said, wanted",
    [
        ({"component_attention_backends": "mm=torch_native"}, ("torch_native", "component mm")),
        ({}, ("flex_attention", "configure()")),
    ],
)
def test_the_component_mm_ranks_above_the_setting(said: dict[str, Any], wanted: tuple[str, str]) -> None:
    polyattn.configure(mm_attention_backend="flex_attention", **said)
    assert source(packed(72)) == wanted
    polyattn.check_components()


def test_a_tower_within_a_component_of_a_pipeline() -> None:
    tensors = packed(72)
    polyattn.configure(
        mm_attention_backend="flex_attention",
        component_attention_backends="text_encoder=torch_sdpa,vae.mm=torch_native",
    )
    with polyattn.component("text_encoder"):
        assert source(tensors) == ("torch_sdpa", "component text_encoder")
    with polyattn.component("vae"):
        assert source(tensors) == ("torch_native", "component vae.mm")
    with polyattn.component("transformer"):
        assert source(tensors) == ("flex_attention", "configure()")
    with polyattn.component("transformer", "cross"):  # has a role of its own
        assert source(tensors)[0] != "flex_attention"
    with polyattn.use_backend("torch_native"):
        assert source(tensors) == ("torch_native", "use_backend")


def test_entering_twice_is_entering_once() -> None:
    assert not multimodal.entered()
    with multimodal():
        assert multimodal.entered()
        with multimodal():
            assert polyattn.selection.overrides.SCOPE.get() == ("", "mm", "")
    assert not multimodal.entered()


def test_a_setting_that_names_nothing_is_an_error() -> None:
    *tensors, cu = packed(72)
    polyattn.configure(mm_attention_backend="no_such_backend")
    with pytest.raises(BackendUnavailableError, match="no_such_backend"):
        vision_attention(*tensors, cu, max(LENGTHS))


def test_documents_that_do_not_fit_are_refused() -> None:
    *tensors, cu = packed(72)
    with pytest.raises(InvalidInputError, match="cu_seqlens"):
        vision_attention(*tensors, cu[:-1], max(LENGTHS))
    with pytest.raises(InvalidInputError, match="max_seqlen"):
        vision_attention(*tensors, cu, 3)


# Towers of transformers -----------------------------------------------------------------------------------------------

GRID = torch.tensor([[1, 4, 6], [1, 2, 2], [2, 4, 4]])
"""Two images and a video of two frames: documents of 24, 4, 16 and 16 patches."""


@pytest.fixture
def tower() -> Iterator[Any]:
    """A vision tower in the shape of Qwen2-VL, heads of 72, random weights."""
    transformers = pytest.importorskip("transformers")
    from polyattn.integrations import transformers as host

    config = transformers.Qwen2VLConfig().vision_config
    for name, value in {"depth": 2, "embed_dim": 144, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    host.install()
    with torch.no_grad(), warnings.catch_warnings():
        model = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(config).eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
        yield model
    host.uninstall()


def patches(tower: Any) -> Tensor:
    config = tower.config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return torch.randn(int(GRID.prod(1).sum()), width, generator=torch.Generator().manual_seed(1))


def run(tower: Any, name: str) -> Tensor:
    tower.set_attn_implementation(name)
    return tower(patches(tower), grid_thw=GRID).last_hidden_state


@pytest.mark.parametrize("pack", [False, True])
def test_a_vision_tower_equals_eager(tower: Any, pack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyattn.integrations.transformers import report

    eager = run(tower, "eager")
    if pack:  # as transformers calls attention under names it takes for flash kernels
        modeling = type(tower).__init__.__globals__
        monkeypatch.setitem(modeling, "is_flash_attention_requested", lambda config: True)
        monkeypatch.setitem(modeling, "get_max_seqlen", lambda cu, *_, **__: int(cu.diff().max()))
    got = run(tower, "polyattn")
    assert ((got - eager).norm() / eager.norm()).item() < 1e-5
    layers = report(tower, patches(tower), grid_thw=GRID)
    assert len(layers) == 2 if pack else 8
    assert {layer.selection.request.family for layer in layers} == {"varlen" if pack else "dense"}


@pytest.mark.parametrize("pack", [False, True])
def test_the_setting_reaches_a_vision_tower(tower: Any, pack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyattn.integrations.transformers import report

    if pack:
        modeling = type(tower).__init__.__globals__
        monkeypatch.setitem(modeling, "is_flash_attention_requested", lambda config: True)
        monkeypatch.setitem(modeling, "get_max_seqlen", lambda cu, *_, **__: int(cu.diff().max()))
    eager = run(tower, "eager") if not pack else None
    polyattn.configure(attention_backend="torch_sdpa", mm_attention_backend="torch_native")
    got = run(tower, "polyattn")
    found = {
        (layer.selection.backend, layer.selection.source) for layer in report(tower, patches(tower), grid_thw=GRID)
    }
    assert found == {("torch_native", "configure()")}
    if eager is not None:
        assert ((got - eager).norm() / eager.norm()).item() < 1e-5
    with polyattn.component("transformer", "cross"):  # a role of its own: the general setting
        found = {layer.selection.backend for layer in report(tower, patches(tower), grid_thw=GRID)}
    assert found == {"torch_sdpa"}


def test_a_text_model_does_not_obey_the_setting() -> None:
    transformers = pytest.importorskip("transformers")
    from polyattn.integrations import transformers as host

    host.install()
    try:
        config = transformers.LlamaConfig(
            vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        model = transformers.LlamaModel._from_config(config, attn_implementation="polyattn").eval()
        polyattn.configure(attention_backend="torch_sdpa", mm_attention_backend="torch_native")
        with torch.no_grad():
            (layer,) = host.report(model, torch.tensor([[1, 2, 3]]))
        assert layer.selection.backend == "torch_sdpa"
    finally:
        host.uninstall()


def test_a_compiled_tower_obeys_the_setting() -> None:
    *tensors, cu = packed(72)
    polyattn.configure(mm_attention_backend="torch_native")
    ran = torch.compile(lambda *given: vision_attention(*given, 12), backend="eager", fullgraph=True)
    torch.testing.assert_close(ran(*tensors, cu), plain(*tensors).float(), atol=2e-6, rtol=1e-5)
