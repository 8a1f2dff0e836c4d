"""Caches of latent rows in fewer bits: what is stored, how far it is off, and attention over it."""

from __future__ import annotations

import pytest
import torch

import polyattn
from polyattn.errors import InvalidInputError
from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.semantics.kv_quant import LATENT_FORMATS, LatentFormat, latent_format, mla_pack, mla_unpack
from polyattn.serving import KVCacheConfig
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams
from polyattn.serving.kv_cache.pool import KVPool
from polyattn.serving.layer import AttentionLayer

from .models import deepseek, prompt

FORMATS = pytest.mark.parametrize("form", LATENT_FORMATS, ids=lambda f: f"{f.kv_dtype}-{f.kv_scales or 'one'}")


def dims(form: LatentFormat) -> tuple[int, int]:
    return form.widths or (96, 64)


@FORMATS
def test_rows_are_read_as_they_were_written(form: LatentFormat) -> None:
    torch.manual_seed(0)
    width, value = dims(form)
    layer = AttentionLayer(0, 2, 1, width, v_head_dim=value, scale=0.1, latent=True)
    pool = KVPool(
        [layer],
        KVCacheConfig(form.kv_dtype, 4, scales=form.kv_scales or "tensor" * form.kv_dtype.endswith("e4m3")),
        6,
        dtype=torch.float32,
    )
    rows, slots = torch.randn(20, width), torch.randperm(24)[:20]
    pool.write(0, slots, rows)
    cache = pool.cache(0)
    assert cache.cache is not None
    assert (cache.cache.dtype, cache.cache.shape[2]) == (form.dtype, form.entries(width))
    assert latent_format(cache.cache, width) is form
    assert (cache.kv_dtype, cache.kv_scales) == (form.kv_dtype, form.kv_scales)
    found = pool.read(0, slots, torch.float32)
    error = float((found - rows).norm() / rows.norm())
    assert form.error / 4 < error < form.error
    assert torch.equal(found, mla_unpack(mla_pack(rows, form.kv_dtype, form.kv_scales)))
    pool.move(0, slots[:2], slots[2:4])
    assert torch.equal(pool.read(0, slots[2:4], torch.float32), found[:2])


@FORMATS
def test_attention_is_that_over_the_rows_as_they_are_stored(form: LatentFormat) -> None:
    torch.manual_seed(1)
    width, value = dims(form)
    rows, query = torch.randn(6, 4, width), torch.randn(3, 2, width)
    step = {
        "page_table": torch.tensor([[3, 0, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([11], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 11,
        "scale": 0.1,
        "v_head_dim": value,
    }
    cache = mla_pack(rows, form.kv_dtype, form.kv_scales)
    wanted = polyattn.mla_attention(query, mla_unpack(cache), **step, backend="reference")
    exact = polyattn.mla_attention(query, rows, **step, backend="reference")
    for backend in (None, "torch_native"):
        found = polyattn.mla_attention(query, cache, **step, backend=backend)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert float((wanted - exact).norm() / exact.norm()) < 3 * form.error


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
def test_models_of_other_widths_are_served(dtype: str) -> None:
    model = deepseek(qk_rope_head_dim=16)
    engine = Engine(CausalLMRunner(model), EngineConfig(KVCacheConfig(dtype, page_size=4)))
    output = engine.generate([prompt(12, 12)], SamplingParams(max_new_tokens=6))[0]
    assert len(output.token_ids) == 6
    again = engine.generate([prompt(12, 12)], SamplingParams(max_new_tokens=6))[0]
    assert again.cached_tokens
    assert again.token_ids == output.token_ids


def test_a_cache_that_is_none_of_them() -> None:
    step = {
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "max_seqlen_q": 1,
        "max_seqlen_k": 1,
        "scale": 0.1,
        "v_head_dim": 64,
    }
    with pytest.raises(InvalidInputError, match=r"cache torch.uint8 \[2, 4, 96\]; .* uint8 \[pages, page_size, 54\]"):
        polyattn.mla_attention(torch.zeros(1, 2, 96), torch.zeros(2, 4, 96, dtype=torch.uint8), **step)
    with pytest.raises(InvalidInputError, match=r"rows of fp8_e4m3 with scales by block128 hold 576, the first 512"):
        polyattn.mla_attention(torch.zeros(1, 2, 576), torch.zeros(2, 4, 656, dtype=torch.uint8), **step)
