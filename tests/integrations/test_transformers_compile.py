"""Models on polyattn under torch.compile: one graph, and lengths that do not compile again."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import polyattn

GATE = 1e-5
pytestmark = [
    pytest.mark.usefixtures("installed"),
    # torch's compiler imports torch.jit, which older releases of torch themselves warn of.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ids_of(length):
    return torch.randint(3, 120, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("side", ["none", "left"])
def test_one_graph(build, relative, side):
    model = build("llama")
    ids, mask = ids_of(9), None
    if side == "left":
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
    rows = torch.ones_like(ids).bool() if mask is None else mask.bool()
    with torch.no_grad():
        eager = model(ids, attention_mask=mask).logits[rows]
        model.set_attn_implementation("polyattn")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert relative(compiled(ids, attention_mask=mask).logits[rows], eager) < GATE


def test_lengths_do_not_compile_again(build, relative):
    model = build("llama")
    lengths = (5, 9, 17, 33, 40)
    with torch.no_grad():
        eager = [model(ids_of(n)).logits for n in lengths]
        model.set_attn_implementation("polyattn")
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
        for n, wanted in zip(lengths, eager, strict=True):
            assert relative(compiled(ids_of(n)).logits, wanted) < GATE
    assert counter.frame_count <= 2


def test_sinks_windows_and_gradients_compile(build, relative):
    """One layer of a gpt-oss; its experts are no business of ours."""
    model = build(
        "gpt_oss", sliding_window=4, num_local_experts=2, num_experts_per_tok=1, num_hidden_layers=1,
        layer_types=["sliding_attention"],
    ).model  # fmt: skip
    layer = model.layers[0].self_attn
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    places = model.rotary_emb(hidden, torch.arange(9)[None])
    distance = torch.arange(9)[:, None] - torch.arange(9)[None]
    seen = ((distance >= 0) & (distance < 4))[None, None]
    found = {}
    for name, mask in (("eager", torch.zeros(1, 1, 9, 9).masked_fill(~seen, float("-inf"))), ("polyattn", seen)):
        model.set_attn_implementation(name)
        layer.zero_grad()
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if name == "polyattn" else layer
        run(hidden_states=hidden, position_embeddings=places, attention_mask=mask)[0].square().mean().backward()
        assert layer.sinks.grad.any()
        found[name] = torch.cat([p.grad.flatten() for p in layer.parameters()])
    assert relative(found["polyattn"], found["eager"]) < GATE


@pytest.mark.slow
def test_a_scope_entered_after_compiling_takes_effect(build, relative):
    model = build("llama")
    model.set_attn_implementation("polyattn")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = ids_of(9)
    with torch.no_grad():
        plain = compiled(ids).logits
        with polyattn.use_backend("fa"), pytest.raises(Exception, match="fa"):
            compiled(ids)
        with polyattn.use_backend("reference"):
            assert relative(compiled(ids).logits, plain) < GATE
