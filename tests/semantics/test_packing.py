"""Whose a packed token is."""

from __future__ import annotations

import pytest
import torch

from polyattn.semantics.packed import per_token, sequence_ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_s1_a_packed_token_is_of_one_sequence(dtype: torch.dtype) -> None:
    starts = torch.tensor([0, 0, 2, 2, 5, 5], dtype=dtype)
    found = sequence_ids(5, starts)
    assert found.dtype == torch.int64
    assert found.tolist() == [1, 1, 3, 3, 3]
    assert sequence_ids(5, starts.repeat_interleave(2)[::2]).tolist() == found.tolist(), "lengths may have a stride"
    assert sequence_ids(0, starts[:1]).tolist() == []


def test_what_sequences_have_for_each_token() -> None:
    starts = torch.tensor([0, 0, 1, 1, 2], dtype=torch.int32)
    table, lens = torch.arange(8).view(4, 2), torch.tensor([5, 6, 7, 8])
    assert [found.tolist() for found in per_token(2, starts, table, lens)] == [[[2, 3], [6, 7]], [6, 8]]
