"""The causal convolution of linear attention: what it computes, and the tail that it carries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.semantics.linear_conv import causal_conv

B, S, C, W = 2, 9, 5, 4


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    shapes: tuple[Any, ...] = ((B, S, C), (C, W), (C,), (B, C, W - 1))
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


def by_hand(path: list[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """The output of the last of the inputs [C]."""
    row = sum((weight[:, -1 - i] * path[-1 - i] for i in range(min(W, len(path)))), bias)
    return row / (1 + (-row).exp())


def test_it_is_the_sum_over_the_last_inputs() -> None:
    x, weight, bias, tail = inputs()
    out, last = causal_conv(x, weight, bias, tail)
    bare, _ = causal_conv(x, weight, bias)
    for b in range(B):
        before = list(tail[b].T)
        for t in range(S):
            torch.testing.assert_close(out[b, t], by_hand([*before, *x[b, : t + 1]], weight, bias))
            torch.testing.assert_close(bare[b, t], by_hand(list(x[b, : t + 1]), weight, bias))
    assert torch.equal(last, x[:, -W + 1 :].mT)


@pytest.mark.parametrize("cut", [1, 2, 5, 8])
def test_a_prompt_in_two_calls_gives_what_it_gives_in_one(cut: int) -> None:
    """Also where the first piece is shorter than the tail: it keeps what was before."""
    x, weight, bias, tail = inputs()
    out, last = causal_conv(x, weight, bias, tail)
    first, carried = causal_conv(x[:, :cut], weight, bias, tail)
    rest, end = causal_conv(x[:, cut:], weight, bias, carried)
    torch.testing.assert_close(torch.cat([first, rest], 1), out)
    assert torch.equal(end, last)
    if cut < W - 1:
        assert torch.equal(carried[..., :-cut], tail[..., cut:])


def test_a_tail_that_is_one_short_shows() -> None:
    x, weight, bias, tail = inputs()
    _, carried = causal_conv(x[:, :5], weight, bias, tail)
    short = torch.cat([torch.zeros_like(carried[..., :1]), carried[..., 1:]], -1)
    right, wrong = (causal_conv(x[:, 5:], weight, bias, t)[0] for t in (carried, short))
    assert (right - wrong)[:, 0].abs().max() > 0.01
    assert torch.equal(right[:, W - 1 :], wrong[:, W - 1 :])


def test_packed_sequences_have_tails_of_their_own() -> None:
    x, weight, bias, _ = inputs()
    flat, cu = x.reshape(1, B * S, C), torch.tensor([0, 1, 1, 3, 12, B * S], dtype=torch.int32)
    tails = torch.randn(5, C, W - 1, dtype=torch.float64)
    out, last = causal_conv(flat, weight, bias, tails, cu_seqlens=cu)
    for n, (start, end) in enumerate([(0, 1), (1, 1), (1, 3), (3, 12), (12, 18)]):
        right, tail = causal_conv(flat[:, start:end], weight, bias, tails[n : n + 1])
        torch.testing.assert_close(out[:, start:end], right)
        assert torch.equal(last[n : n + 1], tail)


def test_drafts_see_their_path_and_leave_its_tail() -> None:
    x, weight, bias, tail = inputs()
    parents = torch.tensor([[-1, 0, 0, 1, 3, 4, -1, 6, 2], [-1, -1, 1, 2, 3, 4, 5, 6, 7]])
    out, tails = causal_conv(x, weight, bias, tail, every_state=True, parents=parents)
    chain, chained = causal_conv(x, weight, bias, tail, every_state=True)
    torch.testing.assert_close(chain, causal_conv(x, weight, bias, tail)[0])
    for b in range(B):
        for node in range(S):
            path = [node]
            while parents[b, path[0]] >= 0:
                path.insert(0, int(parents[b, path[0]]))
            right, last = causal_conv(x[b : b + 1, path], weight, bias, tail[b : b + 1])
            torch.testing.assert_close(out[b, node], right[0, -1])
            assert torch.equal(tails[b, node], last[0])
            assert torch.equal(
                chained[b, node], causal_conv(x[b : b + 1, : node + 1], weight, None, tail[b : b + 1])[1][0]
            )


def test_gradients() -> None:
    tensors = [t.requires_grad_() for t in inputs()]
    assert torch.autograd.gradcheck(lambda *given: causal_conv(*given), tensors)
