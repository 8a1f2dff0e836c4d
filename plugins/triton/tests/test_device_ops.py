"""A pool whose rows the kernels write holds, bit for bit, what one holds whose rows core writes."""

from __future__ import annotations

import pytest
import torch

from polyattn.serving import AttentionLayer, KVCacheConfig, KVPool
from polyattn.serving import device_ops as registry
from polyattn.serving.device_ops import device_ops
from polyattn_triton import plugin, runtime

DEVICE = "cpu" if runtime.INTERPRETED else "cuda"
LAYERS = [AttentionLayer(0, 4, 2, 32, v_head_dim=16), AttentionLayer(1, 4, 1, 576, 512, scale=1.0, latent=True)]


def test_pools_on_gpus_are_written_by_them():
    assert plugin.POLYATTN_API_VERSION == 1
    ops = device_ops("cuda")
    assert ops is not None
    assert ops.name == "polyattn-triton"


@pytest.mark.parametrize("kv_dtype, scales", [("auto", ""), ("fp8_e4m3", ""), ("fp4_e2m1", ""), ("int8", "token")])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_same_bits(kv_dtype, scales, layout, monkeypatch):
    # Latent rows have a format in FP8 only.
    layers = LAYERS if kv_dtype in ("auto", "fp8_e4m3") else LAYERS[:1]
    config = KVCacheConfig(kv_dtype, 4, layout, scales)
    pools = []
    for found in (None, device_ops("cuda")):
        monkeypatch.setattr("polyattn.serving.pool.device_ops", lambda device_type, found=found: found)
        pools.append(KVPool(layers, config, 8, dtype=torch.bfloat16, device=DEVICE))
    assert [pool.writer(0) for pool in pools] == ["polyattn", "polyattn-triton"]
    slots = torch.tensor([9, 30, 4, 11, 12], device=DEVICE)
    given = {
        0: (torch.randn(2, 5, 32).to(DEVICE).bfloat16().transpose(0, 1), torch.randn(5, 2, 16).to(DEVICE).bfloat16())
    }
    given[1] = (torch.randn(576, 5).to(DEVICE).bfloat16().T, None)  # no dense last axis
    for pool in pools:
        for layer in layers:
            pool.make_scales(layer.layer_id, slots - 1, *given[layer.layer_id])
            pool.write(layer.layer_id, slots, *given[layer.layer_id])
    for layer in layers:
        for name in ("key_cache", "value_cache", "k_scale", "v_scale", "cache"):
            a, b = (getattr(pool.cache(layer.layer_id), name) for pool in pools)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_float64_stays_with_core(monkeypatch):
    monkeypatch.setattr("polyattn.serving.pool.device_ops", lambda device_type: registry.device_ops("cuda"))
    pool = KVPool(LAYERS[:1], KVCacheConfig("fp8_e4m3", 4), 8, dtype=torch.float64, device=DEVICE)
    assert pool.writer(0) == "polyattn"
