"""PyTorch's cuDNN backward may be given one layout of an output's gradient alone: see `torch_sdpa`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.backends import torch_sdpa
from polyattn.contract import AttentionRequest

SEEN: list[tuple[int, ...]] = []


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor) -> Tensor:
        return query.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        SEEN.append(grad.stride())
        return grad


@pytest.mark.parametrize(("layout", "fields"), [("BSHD", {"window": (2, 2)}), ("BHSD", {"window": (-1, 1)})])
def test_gradients_of_masked_calls_come_in_one_layout(
    layout: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sdpa, "_sdpa", lambda query, *_, **__: Kernel.apply(query))
    request = AttentionRequest(
        platform="cuda", dtype="bfloat16", heads=3, kv_heads=3, head_dim=8, layout=layout, grad=("query",), **fields
    )
    bound = torch_sdpa.TorchSDPA().bind(request.normalised())
    query = torch.randn(2, 5, 3, 8) if layout == "BSHD" else torch.randn(2, 3, 5, 8)
    SEEN.clear()
    gradients = []
    dout = torch.randn_like(query)
    for laid_out in (dout, dout.transpose(1, 2).contiguous().transpose(1, 2), dout[:, :, :, :1].expand_as(dout)):
        leaf = query.clone().requires_grad_()
        bound.forward(leaf, query, query).backward(laid_out)
        gradients.append(leaf.grad)
        assert torch.equal(leaf.grad, laid_out)
    assert len(SEEN) == 3
    assert len(set(SEEN)) == 1
