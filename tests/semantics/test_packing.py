"""Whose a packed token is."""

from __future__ import annotations

import pytest
import torch

from polyattn.packing import owners


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_s1_a_packed_token_is_of_one_sequence(dtype: torch.dtype) -> None:
    starts = torch.tensor([0, 0, 2, 2, 5, 5], dtype=dtype)
    found = owners(5, starts)
    assert found.dtype == torch.int64
    assert found.tolist() == [1, 1, 3, 3, 3]
    assert owners(5, starts.repeat_interleave(2)[::2]).tolist() == found.tolist(), "lengths may have a stride"
    assert owners(0, starts[:1]).tolist() == []
