"""Lists of the highest scores, under Triton's interpreter, against `top_tokens` of core."""

from __future__ import annotations

import pytest
import torch

from polyattn.semantics import token_index
from polyattn_triton.kernels import top


def scores(kind: str, rows: int, count: int) -> torch.Tensor:
    found = torch.randn(rows, count, generator=torch.Generator().manual_seed(count))
    if kind == "many equal":
        return found.round()
    if kind == "below zero":
        return -found.abs()
    if kind == "no numbers":
        for step, value in ((3, torch.nan), (5, -torch.inf), (7, torch.inf)):
            found[:, step - 1 :: step] = value
    if kind == "far apart":
        found[:, ::7] = 0.0
        found[:, 1::5] *= 1e-30
        found[:, 2::11] *= 1e30
    return found


@pytest.mark.parametrize("kind", ["usual", "many equal", "below zero", "no numbers", "far apart"])
@pytest.mark.parametrize(
    ("span", "count", "topk"),
    [(16384, 300, 20), (256, 1000, 64), (256, 900, 128), (16384, 50, 64), (256, 4000, 1), (256, 700, 200)],
)
def test_the_highest(monkeypatch: pytest.MonkeyPatch, span: int, count: int, topk: int, kind: str) -> None:
    monkeypatch.setattr(top, "SPAN", span)
    given = scores(kind, 4, count)
    seen = torch.tensor([count, min(topk // 2, count), min(count, 2 * topk), 0])
    found, wanted = (function(given, seen, topk) for function in (top.top_tokens, token_index.top_tokens))
    assert found.shape == wanted.shape == (4, topk)
    assert found.dtype == torch.int32
    real = given.nan_to_num(nan=torch.finfo(given.dtype).min, neginf=torch.finfo(given.dtype).min)
    for row, lists in enumerate(zip(found.tolist(), wanted.tolist(), strict=True)):
        own, other = ([place for place in one if place >= 0] for one in lists)
        assert len(set(own)) == len(own) == len(other)
        assert all(place < seen[row] for place in own)
        assert torch.equal(real[row, own].sort().values, real[row, other].sort().values)


def test_no_scores() -> None:
    assert top.top_tokens(torch.zeros(2, 0), torch.zeros(2).int(), 3).tolist() == [[-1] * 3] * 2
    assert top.top_tokens(torch.zeros(0, 5), torch.zeros(0).int(), 3).shape == (0, 3)


def test_scores_that_are_not_dense() -> None:
    wide = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)).T
    (found,) = top.top_tokens(wide, torch.full((3,), 40), 5)[1:2].sort().values
    assert torch.equal(found, wide[1].topk(5).indices.sort().values.int())


def test_lengths_that_are_a_column() -> None:
    given = torch.randn(4, 40, generator=torch.Generator().manual_seed(2))
    columns = torch.tensor([[40, 1], [0, 9], [3, 2], [7, 5]], dtype=torch.int32)
    found = top.top_tokens(given, columns[:, 0], 8)
    assert (found >= 0).sum(1).tolist() == [8, 0, 3, 7]
