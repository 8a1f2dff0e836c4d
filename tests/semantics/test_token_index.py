"""The indexer of DeepSeek sparse attention against its definition, token by token."""

from __future__ import annotations

import pytest
import torch

from polyattn.errors import InvalidInputError
from polyattn.semantics.token_index import hadamard, index_scores, pack_index, round_index, top_tokens, unpack_index

T, S, H, D = 7, 41, 5, 16


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scores_are_the_definition() -> None:
    q, k, w = drawn(T, H, D), drawn(S, D, seed=1), drawn(T, H, seed=2)
    wanted = torch.zeros(T, S, dtype=torch.float64)
    for t in range(T):
        for s in range(S):
            wanted[t, s] = sum(w[t, j] * max(float(q[t, j] @ k[s]), 0.0) for j in range(H))
    torch.testing.assert_close(index_scores(q, k, w), wanted, rtol=0, atol=1e-12)
    batched = index_scores(torch.stack([q, q]), torch.stack([k, k.flip(0)]), torch.stack([w, w]))
    torch.testing.assert_close(batched[1], wanted.flip(1), rtol=0, atol=1e-12)
    assert index_scores(q.bfloat16(), k.bfloat16(), w.float()).dtype == torch.float32


@pytest.mark.parametrize("topk", [1, 6, 41, 50])
def test_lists_are_the_highest_that_are_seen(topk: int) -> None:
    scores, seen = drawn(T, S), torch.tensor([0, 1, 3, 6, 7, 40, 41])
    found = top_tokens(scores, seen, topk)
    assert found.shape == (T, topk)
    assert found.dtype == torch.int32
    for row, count, listed in zip(scores, seen.tolist(), found.tolist(), strict=True):
        best = row[:count].argsort(descending=True)[:topk].tolist()
        assert sorted(place for place in listed if place >= 0) == sorted(best)
        assert listed.count(-1) == topk - len(best)


def test_scores_that_are_no_numbers_hide_no_token() -> None:
    scores = torch.tensor([[float("nan"), 1.0, float("-inf"), 2.0]])
    assert sorted(top_tokens(scores, torch.tensor([3]), 4)[0].tolist()) == [-1, 0, 1, 2]


def test_rotated_rows_have_the_same_products() -> None:
    q, k = drawn(T, 64), drawn(S, 64, seed=1)
    torch.testing.assert_close(hadamard(q) @ hadamard(k).T, q @ k.T, rtol=0, atol=1e-12)
    spike = torch.zeros(1, 64, dtype=torch.float64)
    spike[0, 9] = 8.0
    assert torch.equal(hadamard(spike).abs(), torch.ones(1, 64, dtype=torch.float64))


def test_rotations_of_another_width_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="rows of 24 numbers; a Hadamard matrix of powers of two"):
        hadamard(drawn(2, 24))


def test_eight_bits_with_a_scale_of_a_power_of_two() -> None:
    rows = drawn(S, 128).float() * torch.logspace(-6, 6, S)[:, None]
    packed = pack_index(rows)
    assert packed.shape == (S, 132)
    assert packed.dtype == torch.uint8
    scale = packed[:, 128:].contiguous().view(torch.float32)
    assert torch.equal(torch.log2(scale), torch.log2(scale).round())
    found = unpack_index(packed)
    assert ((found - rows).norm(dim=1) < 0.04 * rows.norm(dim=1)).all()  # three bits of mantissa
    assert torch.equal(round_index(rows), found)
    assert torch.equal(round_index(rows.bfloat16()), unpack_index(pack_index(rows.bfloat16())).bfloat16())
    assert not unpack_index(pack_index(torch.zeros(1, 128))).any()


def test_lists_of_eight_bits_are_those_of_the_definition_where_margins_exceed_rounding() -> None:
    q, k, w = drawn(T, H, 128), drawn(400, 128, seed=1), drawn(T, H, seed=2).abs()
    scores, topk = index_scores(q, k, w), 32
    rounded = index_scores(*(unpack_index(pack_index(hadamard(rows))) for rows in (q, k)), w.float())
    limit = 0.05 * scores.std()
    assert (rounded - scores).abs().max() < 8 * limit
    edge = scores.topk(topk).values[:, -1:]
    listed = top_tokens(rounded, torch.full((T,), 400), topk).long()
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, listed, True)
    far = (scores - edge).abs() > 2 * (rounded - scores).abs().max()
    assert far.float().mean() > 0.5
    assert torch.equal(chosen[far], (scores >= edge)[far])
