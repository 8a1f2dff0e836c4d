"""After a commit the cache is what plain decoding of the accepted tokens would have left."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from polyattn.errors import InvalidInputError
from polyattn.serving.kv_cache.pool import KVCacheConfig, KVPool
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.speculative import Accepted, commit, greedy_accept
from polyattn.serving.step.tree import DraftTree

PARENTS = [[-1, 0, 0, 1, 2, 2, 4], [-1, 0, 1, 1, 2, 3, 5], [-1, 0, 0, 0, 3, 4, 5]]


def accepted(paths: list[list[int]]) -> tuple[Accepted, torch.Tensor]:
    """Trees whose accepted paths are given, and the tokens of their nodes."""
    tokens = torch.arange(7).repeat(len(paths), 1)
    predicted = torch.full_like(tokens, 7)
    for row, path in enumerate(paths):
        for node, following in itertools.pairwise(path):
            predicted[row, node] = following
    logits = torch.nn.functional.one_hot(predicted, 8).float()
    return greedy_accept(DraftTree.from_parents(PARENTS[: len(paths)]), tokens, logits), tokens


@pytest.mark.parametrize("flat", [True, False])
def test_the_path_lies_side_by_side_after_the_prefix(flat: bool) -> None:
    paths = [[0, 2, 4, 6], [0], [0, 3, 4, 5, 6]]
    found, tokens = accepted(paths)
    assert found.lists()[0] == paths
    # Prefixes of 3, 0 and 9 tokens in rooms of 20 slots; a cache of token numbers, the prefix negative.
    starts = torch.tensor([3, 20, 49])
    slots = starts[:, None] + torch.arange(7)
    cache = -torch.arange(80)
    cache[slots] = 100 * (1 + torch.arange(3))[:, None] + tokens
    before = cache.clone()
    sources, targets = commit(found, slots.reshape(-1) if flat else slots)
    assert sources.shape == targets.shape == (21,)
    cache[targets] = cache[sources]
    for row, (start, path) in enumerate(zip(starts.tolist(), paths, strict=True)):
        assert cache[start : start + len(path)].tolist() == [100 * (row + 1) + node for node in path]
    untouched = torch.ones_like(cache, dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(cache[untouched], before[untouched])


def test_targets_come_once_and_rejected_drafts_stay() -> None:
    found, _ = accepted([[0, 2], [0, 1, 3]])
    slots = torch.arange(14).reshape(2, 7)
    sources, targets = commit(found, slots)
    assert targets.tolist() == list(range(14))
    assert sources.tolist() == [0, 2, 2, 3, 4, 5, 6, 7, 8, 10, 10, 11, 12, 13]


def test_slots_of_another_step_are_refused() -> None:
    found, _ = accepted([[0], [0]])
    with pytest.raises(
        InvalidInputError, match=r"slots has shape \(7,\); one for each node is needed, \[2, 7\] or \[14\]"
    ):
        commit(found, torch.arange(7))


@pytest.mark.parametrize("dtype", ["auto", "fp4_e2m1"])
def test_a_pool_moves_what_was_accepted_with_its_scales(dtype: Any) -> None:
    layers = [AttentionLayer(0, 2, 2, 16), AttentionLayer(1, 2, 2, 16)]
    pool = KVPool(layers, KVCacheConfig(dtype, page_size=4), 12, dtype=torch.float32, device="cpu")
    paths = [[0, 2, 4, 6], [0, 1, 3, 5]]
    found, _ = accepted(paths)
    assert found.lists()[0] == paths
    # Rows of three pages, out of order; prefixes of 3 and 1 tokens.
    pages = torch.tensor([[7, 2, 5], [4, 9, 1]])
    places = torch.tensor([[3], [1]]) + torch.arange(7)
    slots = pages.gather(1, places // 4) * 4 + places % 4
    before = []
    for layer in layers:
        key, value = torch.randn(2, 14, 2, 16, generator=torch.Generator().manual_seed(layer.layer_id))
        pool.write(layer.layer_id, slots.flatten(), key, value)
        before.append(pool.read(layer.layer_id, slots.flatten(), torch.float32))
    pool.move(0, *commit(found, slots))
    for layer, (key, value) in zip(layers, before, strict=True):
        for row, path in enumerate(paths):
            at = slots[row, : len(path)]
            nodes = 7 * row + torch.tensor(path)
            new_key, new_value = pool.read(layer.layer_id, at, torch.float32)
            assert torch.equal(new_key, key[nodes])
            assert torch.equal(new_value, value[nodes])
