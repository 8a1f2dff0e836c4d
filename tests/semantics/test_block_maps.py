"""S8: block maps. What a list lets a query see, and what is said of a map that cannot be one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.errors import InvalidInputError
from polyattn.semantics.block_maps import check_block_map, visible_keys

SHAPE = (64, 128)
QUERY, KEY = torch.empty(2, 4, 100, 16), torch.empty(2, 2, 300, 16)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def counts(*values: int) -> Tensor:
    return ints(*values).view(1, 1, -1)


GOOD = {"block_counts": counts(2, 0), "block_indices": ints([2, 0, -7], [99, 99, 99]).view(1, 1, 2, 3)}


def test_what_is_listed_and_valid_is_seen() -> None:
    check_block_map(QUERY, KEY, SHAPE, **GOOD, block_valid=ints(128, 5, 1))
    seen = visible_keys(SHAPE, 100, 300, **GOOD, block_valid=ints(128, 5, 1))
    expected = torch.zeros(1, 1, 100, 300, dtype=torch.bool)
    expected[:, :, :64, :128] = True
    expected[:, :, :64, 256] = True
    assert torch.equal(seen, expected)


def test_without_valid_sizes_a_block_is_seen_to_the_end() -> None:
    seen = visible_keys(SHAPE, 100, 300, **GOOD)
    assert seen[0, 0].sum(-1).tolist() == [128 + 44] * 64 + [0] * 36


def test_samples_and_heads_may_have_lists_of_their_own() -> None:
    own = ints(*range(16)).view(2, 4, 2, 1) % 3
    check_block_map(QUERY, KEY, SHAPE, torch.ones(2, 1, 2, dtype=torch.int32), own)
    seen = visible_keys(SHAPE, 100, 300, torch.ones(2, 1, 2, dtype=torch.int32), own)
    assert seen.shape == (2, 4, 100, 300)
    assert torch.equal(seen[..., ::128].int().argmax(-1)[..., ::64], own[..., 0].long())


STARTS = {"block_starts": ints([120, 3], [0, 200])[None], "block_valid": ints([30, 100], [128, 1])[None]}
LISTS = {"block_counts": counts(2, 1), "block_indices": ints([1, 0], [0, 7]).view(1, 1, 2, 2)}


def test_blocks_with_starts_are_where_they_say_for_each_key_head() -> None:
    check_block_map(QUERY, KEY, SHAPE, **LISTS, **STARTS)
    seen = visible_keys(SHAPE, 100, 300, **LISTS, **STARTS, group=2)
    assert seen.shape == (1, 4, 100, 300)
    expected = torch.zeros_like(seen)
    expected[:, :2, :, 120:150] = True
    expected[:, :2, :64, 3:103] = True
    expected[:, 2:, :, :128] = True
    expected[:, 2:, :64, 200] = True
    assert torch.equal(seen, expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_starts": ints(0, 1)}, "block_starts has the shape (2,); needed is [B|1, H_kv|1, nK]: B=2, H_kv=2"),
        ({"block_valid": ints(1, 2)}, "block_valid has the shape (2,); needed is [1, 2, 2], the shape of block_starts"),
        ({"block_starts": ints([-1, 3], [0, 200])[None]}, "block_starts holds -1; each block must lie within the 300"),
        (
            {"block_starts": ints([271, 3], [0, 200])[None]},
            "block_starts holds 271; each block must lie within the 300",
        ),
        (
            {"block_starts": ints([102, 3], [0, 200])[None]},
            "block_starts: two blocks have the key 102; a key is in one",
        ),
        ({"block_valid": ints([30, 129], [0, 1])[None]}, "block_valid holds 129; a block has 0 to 128 valid tokens"),
        ({"block_indices": ints([1, 2], [0, 7]).view(1, 1, 2, 2)}, "block_indices lists block 2; there are 2 of 128"),
    ],
)
def test_what_is_said_of_starts_that_cannot_be_some(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_block_map(QUERY, KEY, SHAPE, **{**LISTS, **STARTS, **changes})
    assert said in str(caught.value)


def test_empty_blocks_and_blocks_that_touch_are_in_nobodys_way() -> None:
    starts, valid = ints([5, 300, 0]).view(1, 1, 3), ints([10, 0, 5]).view(1, 1, 3)
    check_block_map(QUERY, KEY, SHAPE, **LISTS, block_starts=starts, block_valid=valid)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_shape": (0, 64)}, "block_shape=(0, 64) must be two numbers of tokens"),
        ({"block_counts": [1, 2]}, "block_counts is a list; a tensor of int32 [B|1, H_q|1, nQ]"),
        ({"block_counts": counts(1, 2).long()}, "block_counts is torch.int64 on cpu; torch.int32 on cpu is needed"),
        ({"block_counts": counts(1, 2, 3)}, "block_counts has the shape (1, 1, 3); needed is [B|1, H_q|1, nQ]: B=2"),
        ({"block_counts": ints(1, 2)}, "block_counts has the shape (2,)"),
        ({"block_indices": ints([0], [1]).view(1, 2, 1, 1)}, "block_indices has the shape (1, 2, 1, 1); needed is"),
        ({"block_valid": ints(1, 2)}, "block_valid has the shape (2,); needed is [nK]: 3 blocks of 128 keys"),
        ({"block_counts": counts(4, 0)}, "block_counts holds 4; block_indices has room for 0 to 3 key blocks a list"),
        ({"block_counts": counts(-1, 0)}, "block_counts holds -1"),
        ({"block_counts": counts(3, 0)}, "block_indices lists block -7; there are 3 of 128 keys, counted from 0"),
        ({"block_counts": counts(2, 1)}, "block_indices lists block 99"),
        ({"block_valid": ints(128, 129, 0)}, "block_valid holds 129; a block has 0 to 128 valid tokens"),
        ({"block_valid": ints(128, -1, 0)}, "block_valid holds -1"),
    ],
)
def test_what_is_said_of_a_map_that_cannot_be_one(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_block_map(QUERY, KEY, **{"block_shape": SHAPE, **GOOD, **changes})
    assert said in str(caught.value)
