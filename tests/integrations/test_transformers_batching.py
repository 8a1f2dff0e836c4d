"""`generate_batch`, transformers' own continuous batching, gives the tokens of `generate` through polyattn."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

import polyattn
from polyattn.integrations import transformers as host
from polyattn.integrations.transformers import batching
from polyattn.integrations.transformers.attention import make_forward
from polyattn.integrations.transformers.keywords import HARMLESS

pytestmark = pytest.mark.usefixtures("installed")
transformers = pytest.importorskip("transformers")
SERVED = Version(transformers.__version__) >= Version("5.23")

BOTH = ["sliding_attention", "full_attention"]
SHAPES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gpt_oss": {"sliding_window": 4, "layer_types": BOTH, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.slow(keep=1)
@pytest.mark.skipif(not SERVED, reason=f"not run: transformers {transformers.__version__} is older than 5.23")
@pytest.mark.parametrize(
    "kind, name", [*((kind, "polyattn") for kind in SHAPES), ("llama", "sdpa"), ("mistral", "sdpa")]
)
def test_its_tokens_are_those_of_generate(build, monkeypatch, kind, name):
    if name == "sdpa":
        host.install("sdpa")
    model = build(kind, **SHAPES[kind])
    model.generation_config.eos_token_id = None
    prompts = [torch.randint(3, 120, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 9, 3)]
    config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    wanted = [model.generate(torch.tensor([ids]), generation_config=config)[0, len(ids) :].tolist() for ids in prompts]
    model.set_attn_implementation(name)
    pages = transformers.ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=8)
    done = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=pages, progress_bar=False
    )
    assert [entry.error for entry in done.values()] == [None] * 3
    assert [done[f"req_{n}"].generated_tokens for n in range(3)] == wanted
    assert model.config._attn_implementation == name


@pytest.mark.skipif(not SERVED, reason=f"not run: transformers {transformers.__version__} is older than 5.23")
def test_other_names_are_still_refused_by_transformers(build):
    model = build("llama")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        model.generate_batch(inputs=[[5, 6]], generation_config=transformers.GenerationConfig(max_new_tokens=1))


def test_the_admission_is_taken_back():
    owner = batching.manager()
    if owner is None:
        pytest.skip(f"not run: names of continuous batching (transformers {transformers.__version__} asks none)")
    inside = owner.switch_to_cb_friendly_attn
    host.uninstall()
    assert owner.switch_to_cb_friendly_attn is not inside
    host.install()


@pytest.mark.parametrize(
    "more", [{}, {"read_index": [], "write_index": [], "block_table": torch.zeros(1, 1)}], ids=["other", "block table"]
)
def test_pages_that_are_not_read(more):
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(
        polyattn.UnsupportedRequestError, match=r"cache \(object\) reached Module .*; leave block tables"
    ):
        make_forward(None, HARMLESS)(torch.nn.Module(), q, q, q, cache=object(), **more)
