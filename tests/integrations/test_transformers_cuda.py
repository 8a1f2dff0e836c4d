"""The same models on an NVIDIA GPU: half precision, compiled decoding with a static cache."""

from __future__ import annotations

import copy

import pytest
import torch

from polyattn.integrations import transformers as host

pytestmark = [
    pytest.mark.usefixtures("installed"),
    # Compilers and CUDA graphs of torch have their own warnings.
    pytest.mark.filterwarnings("default"),
]
pytest.importorskip("transformers")

BOTH = ["sliding_attention", "full_attention"]
SHAPES = {
    "llama": {},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 10},
    "gpt_oss": {"sliding_window": 4, "layer_types": BOTH, "num_local_experts": 2, "num_experts_per_tok": 1},
}
WIDE = {"hidden_size": 128, "head_dim": 64}


@pytest.fixture(autouse=True)
def gpu(device):
    device("cuda", what="models on a GPU")


@pytest.fixture
def ids():
    return torch.randint(3, 120, (2, 33), generator=torch.Generator().manual_seed(1)).cuda()


def left(ids):
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return mask


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_half_precision_is_as_good_as_eager(build, relative, ids, kind, dtype, padded):
    # Experts and embeddings round too: what counts is the distance from eager in fp32, beside eager's own.
    model = build(kind, **SHAPES[kind], **WIDE).cuda()
    mask = left(ids) if padded else None
    rows = torch.ones_like(ids).bool() if mask is None else mask.bool()
    out = {}
    with torch.no_grad():
        exact = model.model(ids, attention_mask=mask).last_hidden_state[rows].double()
        half = copy.deepcopy(model).to(dtype)
        for name in ("eager", "polyattn"):
            half.set_attn_implementation(name)
            out[name] = half.model(ids, attention_mask=mask).last_hidden_state[rows].double()
    assert relative(out["polyattn"], exact) <= 2 * relative(out["eager"], exact) + torch.finfo(dtype).eps
    host.report(half, ids, attention_mask=mask)


@pytest.mark.parametrize("kind", SHAPES)
def test_gradients_in_half_precision(build, relative, ids, kind):
    model = build(kind, **SHAPES[kind], **WIDE).cuda()
    mask = left(ids)
    grads = {}
    for name, one in (("exact", model), ("eager", copy.deepcopy(model).bfloat16()), ("polyattn", None)):
        one = copy.deepcopy(model).bfloat16() if one is None else one
        one.set_attn_implementation("polyattn" if name == "polyattn" else "eager")
        one.model(ids, attention_mask=mask).last_hidden_state[mask.bool()].float().square().mean().backward()
        grads[name] = torch.cat(
            [p.grad.flatten().double() for p in one.model.layers.parameters() if p.grad is not None]
        )
    rule = 2 * relative(grads["eager"], grads["exact"]) + torch.finfo(torch.bfloat16).eps
    assert relative(grads["polyattn"], grads["exact"]) <= rule


def test_compiled_decoding_with_a_static_cache(build, relative, ids):
    """transformers compiles the decoding step into CUDA graphs by itself here."""
    model = build("llama", **WIDE).cuda()
    out = {}
    for name, compiled in (("eager", False), ("polyattn", True)):
        model.set_attn_implementation(name)
        out[name] = model.generate(
            ids, attention_mask=left(ids), max_new_tokens=6, do_sample=False, cache_implementation="static",
            return_dict_in_generate=True, output_logits=True, disable_compile=not compiled,
        )  # fmt: skip
    assert torch.equal(out["polyattn"].sequences, out["eager"].sequences)
    assert relative(torch.stack(out["polyattn"].logits), torch.stack(out["eager"].logits)) < 1e-4
