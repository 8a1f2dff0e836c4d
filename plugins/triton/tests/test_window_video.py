"""Video methods by the kernels of this package, beside what they are defined by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import polyattn
from polyattn.contract import Like
from polyattn.methods.video.vsa import VideoSparse, vsa_reference
from polyattn.methods.video.window import WindowVideo, window_mask
from polyattn.video import Place

from .test_metadata import DEVICE

PLACE = Place(grid=(3, 5, 6), text=(0, 20), valid_text=(0, 11))


class Named:
    """The calls of a method, by this package. On a CPU nobody chooses it without a name."""

    scale = None

    def dense(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return polyattn.attention(query, key, value, layout="BHSD", backend="triton", **given)

    def block_sparse(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return polyattn.block_sparse_attention(query, key, value, layout="BHSD", backend="triton", **given)


def test_ragged_tiles_and_padded_text() -> None:
    tokens = PLACE.tokens
    assert tokens is not None
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, tokens, 64, device=DEVICE, requires_grad=True) for _ in range(3))
    method = WindowVideo(window_reach=[0, 1, 1], window_tile=[4, 4, 4], first_full_step=0, first_full_layer=0)
    plan = method.plan(PLACE, Like(1, 2, 2, tokens, 64, q.dtype, q.device))
    out = method.attend(plan, q, k, v, place=PLACE, kept={}, inner=Named())  # type: ignore[arg-type]
    mask = window_mask(PLACE, [4, 4, 4], [0, 1, 1]).to(DEVICE)
    right = polyattn.attention(q, k, v, attn_mask=mask, layout="BHSD", backend="reference")
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
    dout = torch.randn_like(out)
    grads = [torch.autograd.grad(one, (q, k, v), dout) for one in (out, right)]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_chosen_tiles_and_a_coarse_branch() -> None:
    """Forward and backward of `video_sparse_attn`, text rows and gate included."""
    tokens = PLACE.tokens
    assert tokens is not None
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, tokens, 64, device=DEVICE, requires_grad=True) for _ in range(3))
    gate = torch.randn(1, tokens, 2, 64, device=DEVICE, requires_grad=True)
    place = Place(grid=PLACE.grid, text=PLACE.text, valid_text=PLACE.valid_text, tensors={"gate_compress": gate})
    method = VideoSparse(sparsity=0.5, coarse="gate")
    plan = method.plan(place, Like(1, 2, 2, tokens, 64, q.dtype, q.device))
    out = method.attend(plan, q, k, v, place=place, kept={}, inner=Named())  # type: ignore[arg-type]
    right, chosen = vsa_reference(*(t.cpu() for t in (q, k, v)), place, sparsity=0.5, gate=gate.cpu())
    right = right.to(DEVICE, out.dtype)
    assert chosen.sum(-1).unique().tolist() == [2]
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
    dout = torch.randn_like(out)
    grads = [torch.autograd.grad(one, (q, k, v, gate), dout) for one in (out, right)]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
