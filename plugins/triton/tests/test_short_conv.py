"""The convolution kernel over the tails of a pool, against its definition: prompts, steps, packed rows, drafts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyattn.semantics.linear_conv import causal_conv
from polyattn_triton.kernels import short_conv

from .test_metadata import DEVICE

B, C, W, POOL = 3, 37, 4, 6
SLOTS = torch.tensor([4, 0, 2], device=DEVICE)


def inputs(S: int, dtype: torch.dtype = torch.float32, width: int = W) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    shapes = ((B, S, C), (C, width), (C,), (POOL, C, width - 1))
    x, weight, bias, pool = (torch.randn(shape).to(DEVICE, dtype) for shape in shapes)
    return x, weight, bias, pool


def close(one: Tensor, other: Tensor) -> None:
    limit = 1e-5 if one.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(one, other, rtol=limit, atol=limit)


def wide(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.float() for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("S", [1, 2, 5, 16, 41])
def test_prompts_and_steps(S: int, dtype: torch.dtype) -> None:
    x, weight, bias, pool = inputs(S, dtype)
    right, tails = causal_conv(*wide(x, weight, bias, pool[SLOTS]))
    found = pool.clone()
    out = short_conv.causal_conv(x, weight, bias, found, SLOTS)
    close(out, right.to(dtype))
    assert torch.equal(found[SLOTS], tails.to(dtype))
    others = [1, 3, 5]
    assert torch.equal(found[others], pool[others])


@pytest.mark.parametrize("width", [1, 2, 3, 21])
def test_other_widths_and_rows_with_gaps(width: int) -> None:
    x, weight, _, pool = inputs(41, width=width)
    x, weight = x.mT.contiguous().mT, weight.mT.contiguous().mT
    right, tails = causal_conv(x, weight, None, pool[SLOTS])
    close(short_conv.causal_conv(x, weight, None, pool, SLOTS), right)
    assert torch.equal(pool[SLOTS], tails)
    wider = torch.randn(B, 41, 2 * C + 3, device=DEVICE)[..., 1 : C + 1]
    right, _ = causal_conv(wider, weight, None, pool[SLOTS])
    close(short_conv.causal_conv(wider, weight, None, pool, SLOTS), right)


def test_packed_sequences() -> None:
    """One without tokens and one that nobody keeps a tail of among them."""
    x, weight, bias, pool = inputs(41)
    flat = x.reshape(1, B * 41, C)
    cu = torch.tensor([0, 1, 1, 3, 50, 51, B * 41], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, 5, 0, 1, -1, 2], device=DEVICE)
    given = torch.where((slots < 0)[:, None, None], 0.0, pool[slots])
    right, tails = causal_conv(flat, weight, bias, given, cu_seqlens=cu)
    before = pool.clone()
    close(short_conv.causal_conv(flat, weight, bias, pool, slots, cu_seqlens=cu), right)
    assert torch.equal(pool[slots[slots >= 0]], tails[slots >= 0])
    assert torch.equal(pool[[4, 5]], before[[4, 5]])


@pytest.mark.parametrize("tree", [False, True])
def test_drafts_leave_the_tail_after_each(tree: bool) -> None:
    x, weight, bias, pool = inputs(5)
    parents = torch.tensor([[-1, 0, 0, 1, -1], [-1, 0, 1, 2, 3], [-1, -1, 1, 1, 2]], device=DEVICE) if tree else None
    slots = torch.tensor([4, -1, 2], device=DEVICE)
    given = torch.where((slots < 0)[:, None, None], 0.0, pool[slots])
    right, tails = causal_conv(x, weight, bias, given, every_state=True, parents=parents)
    before, drafted = pool.clone(), torch.full((POOL, 7, C, W - 1), 9.0, device=DEVICE)
    out = short_conv.causal_conv(x, weight, bias, pool, slots, parents=parents, drafted=drafted)
    close(out, right)
    assert torch.equal(pool, before)
    assert torch.equal(drafted[[4, 2], :5], tails[[0, 2]])
    assert (drafted[[4, 2], 5:] == 9).all()
    assert (drafted[[0, 1, 3, 5]] == 9).all()


@pytest.mark.parametrize("planted", ["tail one short", "last token in the tail", "neighbour", "weights turned", "bias"])
def test_planted_errors_show(planted: str) -> None:
    x, weight, bias, pool = inputs(5)
    right, _ = causal_conv(x, weight, bias, pool[SLOTS])
    given, slots = pool.clone(), SLOTS
    if planted == "tail one short":
        given[..., 0] = 0
    elif planted == "last token in the tail":
        given = torch.cat([pool[..., 1:], pool[..., :1]], -1)
    elif planted == "neighbour":
        slots = SLOTS.roll(1)
    elif planted == "weights turned":
        weight = weight.flip(1)
    else:
        bias = bias.roll(1)
    with pytest.raises(AssertionError):
        close(short_conv.causal_conv(x, weight, bias, given, slots), right)


def test_no_tokens_keep_the_tails() -> None:
    x, weight, bias, pool = inputs(0)
    before = pool.clone()
    assert short_conv.causal_conv(x, weight, bias, pool, SLOTS).shape == (B, 0, C)
    assert torch.equal(pool, before)


def test_slots_lengths_and_bias_that_are_columns() -> None:
    x, weight, bias, pool = inputs(41)
    cu = torch.tensor([[0, 7], [3, 7], [41, 7]], dtype=torch.int32, device=DEVICE)[:, 0]
    slots = torch.tensor([[4, 1], [2, 0]], device=DEVICE)[:, 0]
    bias = torch.stack([bias, bias + 9], 1)[:, 0]
    right, tails = causal_conv(x[:1], weight, bias, pool[slots], cu_seqlens=cu)
    close(short_conv.causal_conv(x[:1], weight, bias, pool, slots, cu_seqlens=cu), right)
    assert torch.equal(pool[slots], tails)
