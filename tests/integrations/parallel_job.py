"""What two ranks of test_diffusers_parallel.py run: a tiny Wan by diffusers' context parallelism, beside one rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

from polyattn.errors import UnsupportedRequestError
from polyattn.integrations import diffusers as host

sys.path.insert(0, str(Path(__file__).parent))
from tiny_pipelines import frames, tiny

SIZE = {"height": 64, "width": 64}
# diffusers counts the devices of an accelerator, and a CPU has none.
torch.accelerator.device_count = lambda: 1


def parallel(pipe: Any, degree: str) -> None:
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(**{degree: 2}))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    latents = torch.randn(1, 16, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    text = torch.full((1, 8, 32), 0.3)
    out = model(hidden_states=latents, timestep=torch.tensor([3.0]), encoder_hidden_states=text, return_dict=False)[0]
    out.square().sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if "attn1.to_" in name}


def check(degree: str) -> None:
    pipe = tiny("wan")
    right, wanted = frames(pipe, "wan", **SIZE), gradients(tiny("wan").transformer)
    host.prepare(pipe, {"transformer": "reference"})
    parallel(pipe, degree)
    found = frames(pipe, "wan", **SIZE)
    torch.testing.assert_close(found, right, atol=1e-4 * right.abs().max().item(), rtol=0)
    assert not torch.equal(found, right), "another backend, and another order of sums"
    assert {(row.role, row.backend) for row in host.report(pipe).rows} == {
        ("self", "reference@cpu"),
        ("cross", "reference@cpu"),
    }
    for name, grad in gradients(pipe.transformer).items():
        dist.all_reduce(grad)  # each rank has the share of its tokens
        assert (grad - wanted[name]).norm() < 1e-5 * wanted[name].norm(), (degree, name)


def refused() -> None:
    pipe = tiny("wan")
    host.prepare(pipe, {"transformer": "video_sparse_attn"}, {"coarse": "off"})
    parallel(pipe, "ulysses_degree")
    with pytest.raises(UnsupportedRequestError, match="needs to know which tokens and heads a rank has"):
        frames(pipe, "wan", **SIZE)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for one in ("ulysses_degree", "ring_degree"):
        check(one)
    refused()
    dist.destroy_process_group()
    print("done")
