"""Who serves the parts of a ring on chips that are not here."""

from __future__ import annotations

import torch

import polyattn


def test_a_ring_on_npus_is_served_by_fa_and_a_layer_of_one_device_by_torch() -> None:
    tensors = [torch.zeros(1, 64, 4, 128, dtype=torch.bfloat16) for _ in range(3)]
    there = {"platform": "npu:ascend910b", "installed": ("torch-npu",)}
    step = polyattn.explain(polyattn.bind_part(backward=False), *tensors)
    alone = polyattn.explain(polyattn.bind(), *tensors)
    assert polyattn.what_if(step.request, **there).backend == "fa"
    assert polyattn.what_if(alone.request, **there).backend == "torch_sdpa"
