"""Packed sequences whose borders only `position_ids` say, as DataCollatorWithFlattening packs: none sees another."""

from __future__ import annotations

import pytest
import torch

from polyattn.integrations.transformers import borders
from polyattn.integrations.transformers.attention import make_forward
from polyattn.integrations.transformers.keywords import HARMLESS

GATE = 1e-5
pytestmark = pytest.mark.usefixtures("installed")
transformers = pytest.importorskip("transformers")

BOTH = ["sliding_attention", "full_attention"]
SHAPES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 10},
    "gpt_oss": {"sliding_window": 4, "layer_types": BOTH, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt2": {},
}
LENGTHS = (7, 1, 6)


def drawn(rows):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 120, (rows, length), generator=generator) for length in LENGTHS]


POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.mark.slow(keep=23)
@pytest.mark.parametrize("rows, given", [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_packed_row_is_its_sequences_one_by_one(build, relative, kind, use_cache, rows, given):
    model = build(kind, **SHAPES[kind])
    model.set_attn_implementation("polyattn")
    packed = torch.cat(drawn(rows), 1)
    with torch.no_grad():
        alone = torch.cat([model(ids).logits for ids in drawn(rows)], 1)
        out = model(packed, position_ids=POSITIONS.expand(given, -1), use_cache=use_cache).logits
        mixed = model(packed, use_cache=use_cache).logits
    assert relative(out, alone) < GATE
    assert relative(mixed, alone) > 0.1, "the control does not depend on the borders"


def test_the_collator_of_transformers_trains_each_sequence_alone(build, relative):
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt")
    batch = collator([{"input_ids": ids[0].tolist()} for ids in drawn(1)])
    model = build("llama").train()
    model.set_attn_implementation("polyattn")
    grads = []
    for inputs in ([batch], [{"input_ids": ids, "labels": ids} for ids in drawn(1) if ids.shape[1] > 1]):
        model.zero_grad()
        for one in inputs:
            # The mean over a batch, as the sum that both have.
            (model(**one).loss * (one["labels"][:, 1:] != -100).sum()).backward()
        grads.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert relative(*grads) < GATE


def test_positions_are_looked_at_once_per_pass(build, monkeypatch):
    looked = []
    own = borders.find_borders
    monkeypatch.setattr(borders, "find_borders", lambda ids: looked.append(ids) or own(ids))
    model = build("llama", num_hidden_layers=4)
    model.set_attn_implementation("polyattn")
    model(torch.cat(drawn(1), 1), position_ids=POSITIONS)
    assert len(looked) == 1
    model.generate(drawn(1)[0], max_new_tokens=4, do_sample=False)
    assert len(looked) == 2, "only the prompt has more than one token"


class Layer(torch.nn.Module):
    is_causal = True


def tensors(rows=1):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(rows, 4, 14, 8, generator=generator) for _ in range(3))


def test_positions_that_were_changed_in_place_are_looked_at_again():
    call, given = make_forward(None, HARMLESS), POSITIONS.clone()
    q, k, v = tensors()
    packed, _ = call(Layer().eval(), q, k, v, position_ids=given)
    given.copy_(torch.arange(14))
    plain, _ = call(Layer().eval(), q, k, v, position_ids=given)
    assert torch.equal(plain, call(Layer().eval(), q, k, v)[0])
    assert not torch.equal(plain, packed)
    with torch.inference_mode():
        inside = POSITIONS.clone()
        assert torch.equal(call(Layer().eval(), q, k, v, position_ids=inside)[0], packed)


def test_where_positions_say_nothing_about_borders():
    call = make_forward(None, HARMLESS)
    q, k, v = tensors()
    plain, _ = call(Layer().eval(), q, k, v)
    axes = POSITIONS[None].expand(3, -1, -1)
    for given in (axes, POSITIONS.to("meta"), torch.arange(5, 19)[None], list(range(14))):
        assert torch.equal(call(Layer().eval(), q, k, v, position_ids=given)[0], plain)
    layer = Layer().eval()
    layer.is_causal = False
    assert torch.equal(call(layer, q, k, v, position_ids=POSITIONS)[0], call(layer, q, k, v)[0])


def test_lengths_that_are_given_go_first(relative):
    call = make_forward(None, HARMLESS)
    q, k, v = tensors()
    cu = torch.tensor([0, 9, 14], dtype=torch.int32)
    words = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    out, _ = call(Layer().eval(), q, k, v, **words)
    assert torch.equal(call(Layer().eval(), q, k, v, position_ids=POSITIONS, **words)[0], out)


def test_a_bias_meets_the_borders(relative):
    call = make_forward(None, HARMLESS)
    q, k, v = tensors(2)
    bias = torch.randn(1, 4, 14, 14, generator=torch.Generator().manual_seed(1))
    out, _ = call(Layer().eval(), q, k, v, position_ids=POSITIONS, position_bias=bias)
    numbers = (POSITIONS == 0).cumsum(-1)
    wanted, _ = call(Layer().eval(), q, k, v, position_bias=bias, seq_idx=numbers)
    assert relative(out, wanted) < GATE


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_compiled_model_that_trains_keeps_them_apart(build, relative, kind):
    torch._dynamo.reset()
    model = build(kind, **SHAPES[kind]).train()
    model.set_attn_implementation("polyattn")
    packed = torch.cat(drawn(1), 1)
    wanted = model(packed, position_ids=POSITIONS).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert relative(compiled(packed, position_ids=POSITIONS).logits, wanted) < GATE
