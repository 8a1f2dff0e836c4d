"""Models with linear attention under `install()`: what they compute, packed rows, training and generation."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.integrations import transformers as pt
from polyattn.integrations.common.patching import Patches
from polyattn.integrations.transformers import linear

from ..serving.models import HYBRID, prompt

LENGTHS = (5, 1, 9)


@pytest.fixture
def _installed() -> Iterator[None]:
    pt.install()
    yield
    pt.uninstall()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of `polyattn.linear_attention` had."""
    seen: list[int] = []
    original = linear.linear_attention

    def counted(query: Tensor, *args: Any, **more: Any) -> Any:
        seen.append(query.shape[1])
        return original(query, *args, **more)

    monkeypatch.setattr(linear, "linear_attention", counted)
    return seen


def rows() -> Tensor:
    return torch.tensor([prompt(sum(LENGTHS), 1)])


def packed(words: str) -> dict[str, Any]:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int()
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 9, "max_length_k": 9}
    return {"position_ids": positions, **{"seq_idx": {"seq_idx": number}, "position_ids": {}}.get(words, lengths)}


def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    found: Tensor = model(ids, use_cache=False, **more).logits
    return found


@pytest.mark.parametrize("shape", list(HYBRID))
@pytest.mark.parametrize("name", ["eager", "polyattn"])
def test_logits_and_gradients_are_those_of_transformers(shape: str, name: str, calls: list[int]) -> None:
    model = HYBRID[shape]()
    right = logits(model, rows())
    right.square().mean().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    pt.install()
    try:
        model.set_attn_implementation(name)
        found = logits(model, rows())
        assert calls == [sum(LENGTHS)]
        found.square().mean().backward()
    finally:
        model.set_attn_implementation("eager")
        pt.uninstall()
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    for n, parameter in model.named_parameters():
        if n in expected:
            torch.testing.assert_close(parameter.grad, expected[n], rtol=2e-3, atol=2e-4, msg=n)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("shape", list(HYBRID))
@pytest.mark.parametrize("words", ["cu_seq_lens", "seq_idx", "position_ids"])
def test_packed_rows_are_kept_apart(shape: str, words: str) -> None:
    """transformers needs two packages for that, and raises without them, or mixes them."""
    model = HYBRID[shape](attn_implementation="polyattn")
    found = logits(model, rows(), **packed(words))
    alone = [logits(model, part) for part in rows().split(LENGTHS, 1)]
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)
    found.sum().backward()


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("shape", ["qwen3_next", "kimi_linear"])
def test_positions_are_known_where_a_backward_computes_a_layer_again(shape: str) -> None:
    model = HYBRID[shape](attn_implementation="polyattn").train()
    grads = []
    for words in ("cu_seq_lens", "position_ids"):
        model.zero_grad()
        logits(model, rows(), **packed(words)).square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.gradient_checkpointing_enable()
    assert grads[0].keys() == grads[1].keys()
    for name, right in grads[0].items():
        torch.testing.assert_close(grads[1][name], right, rtol=2e-3, atol=2e-4, msg=name)
    assert linear._positions.get() is None


@pytest.mark.usefixtures("_installed")
def test_padding_is_no_border() -> None:
    """Its positions may be 0 as well. Of packed rows it is the end of the last one."""
    model = HYBRID["qwen3_next"](attn_implementation="polyattn")
    ids, mask = torch.cat([torch.ones(1, 3, dtype=torch.int64), rows()], 1), torch.ones(1, 18, dtype=torch.int64)
    mask[:, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits(model, ids.expand(2, -1), attention_mask=mask.expand(2, -1), position_ids=positions.expand(2, -1))
    torch.testing.assert_close(found[1:, 3:], logits(model, rows()), rtol=1e-4, atol=1e-4)
    behind = {"attention_mask": mask.flip(1), "position_ids": torch.cat([packed("")["position_ids"], mask[:, :3]], 1)}
    found = logits(model, torch.cat([rows(), ids[:, :3]], 1), **behind)
    alone = [logits(model, part) for part in rows().split(LENGTHS, 1)]
    torch.testing.assert_close(found[:, :15], torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


class Model(torch.nn.Module):
    """As transformers' models that hand positions to no layer."""

    def forward(self, inputs_embeds: Tensor, position_ids: Any = None, attention_mask: Any = None, **_: Any) -> Tensor:
        return inputs_embeds


def test_a_model_whose_layers_see_no_positions_refuses_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("transformers.models.toy.modeling_toy")
    module.Model, module.torch_chunk_gated_delta_rule = Model, lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(Model, "__module__", module.__name__)
    own, patches = Model.forward, Patches()
    linear.reach(module, patches)
    x, said = torch.zeros(1, sum(LENGTHS), 4), packed("position_ids")["position_ids"]
    with pytest.raises(InvalidInputError, match=r"Model hands them to no layer.*give cu_seq_lens_q and its partners"):
        Model()(x, position_ids=said)
    compiled = torch.compile(Model(), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="position_ids start again at 0"):
        compiled(x, position_ids=said)
    for fine in (packed("seq_idx"), packed("cu_seq_lens"), {"position_ids": torch.arange(15)[None]}, {}):
        assert Model()(x, **fine) is x
    patches.undo()
    assert Model.forward is own


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_compiled_model_fails_where_positions_alone_say_borders(mode: str) -> None:
    model = HYBRID["qwen3_next"](attn_implementation="polyattn").train(mode == "train")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = torch.arange(sum(LENGTHS))[None]
    torch.testing.assert_close(logits(compiled, rows(), position_ids=plain), logits(model, rows()))
    with pytest.raises(RuntimeError, match=r"position_ids start again at 0 .* give cu_seq_lens_q and its partners"):
        logits(compiled, rows(), **packed("position_ids"))
    assert not linear._traced


@pytest.mark.parametrize("shape", list(HYBRID))
def test_generation_says_the_same(shape: str, calls: list[int]) -> None:
    model, ids = HYBRID[shape](), torch.tensor([prompt(21, 2)])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    right = model.generate(ids, **options)
    pt.install()
    try:
        model.set_attn_implementation("polyattn")
        found = model.generate(ids, **options)
    finally:
        pt.uninstall()
    assert torch.equal(found, right)
    assert calls == [21, *[1] * 7]


def test_a_model_whose_code_is_loaded_later_is_reached_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    own = module.torch_chunk_gated_delta_rule
    monkeypatch.delitem(__import__("sys").modules, module.__name__)
    pt.install()
    assert module.torch_chunk_gated_delta_rule is own
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    HYBRID["qwen3_next"]()
    reached = module.torch_chunk_gated_delta_rule
    assert reached is not own
    HYBRID["qwen3_next"]()
    assert module.torch_chunk_gated_delta_rule is reached
    pt.uninstall()
    assert module.torch_chunk_gated_delta_rule is own


@pytest.mark.usefixtures("_installed")
def test_packed_rows_that_cannot_be_kept_apart_are_refused() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    model = HYBRID["qwen3_next"](attn_implementation="polyattn")
    with pytest.raises(InvalidInputError, match="pack them into one row, and give use_cache=False"):
        logits(model, rows().expand(2, -1), **packed("cu_seq_lens"))
    twice = {**packed("seq_idx"), "seq_idx": packed("seq_idx")["seq_idx"].expand(2, -1)}
    with pytest.raises(InvalidInputError, match=r"\[1, S\] is needed"):
        logits(model, rows().expand(2, -1), **twice)
    with pytest.raises(InvalidInputError, match="pack them into one row, and give use_cache=False"):
        logits(model, rows().expand(2, -1), position_ids=packed("")["position_ids"].expand(2, -1))
    # A cache, which is on by default, is filled and is of no use.
    found = model(rows(), **packed("position_ids"), use_cache=True)
    torch.testing.assert_close(found.logits, logits(model, rows(), **packed("cu_seq_lens")), rtol=1e-4, atol=1e-4)
    with pytest.raises(InvalidInputError, match=r"state has the shape \(3, .*\); needed is \(1, "):
        model(rows()[:, :1], past_key_values=found.past_key_values, position_ids=torch.tensor([[9]]))
    x, starts = torch.randn(1, 4, 3), torch.tensor([0, 3])
    with pytest.raises(UnsupportedRequestError, match="activation 'gelu': silu is computed"):
        module.causal_conv1d_fn(x, torch.randn(4, 4), activation="gelu", cu_seq_lens_q=starts)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("shape", list(HYBRID))
def test_a_report_has_layers_of_both_kinds(shape: str) -> None:
    model = HYBRID[shape](attn_implementation="polyattn")
    found = pt.report(model, rows(), use_cache=False)
    assert [line.selection.request.family for line in found] == ["linear", "dense"]
    assert found[0].layer.startswith("model.layers.0.")
    assert found[0].implementation == ("kda" if shape == "kimi_linear" else "gdn")
    assert not linear._recorders
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
