"""Trees under a window: the mask on the device equals the definition by positions, for every prefix and window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable
from polyattn.serving.step.step import StepBuffers
from polyattn.serving.step.tree import DraftTree
from polyattn.serving.step.tree_windows import windowed_tree_mask

from .rig import tree_mask


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Parents and prefix of each request, and a window."""
    drafts = draw(st.integers(1, 6))
    count = draw(st.integers(1, 3))
    parents = [[draw(st.integers(-1, node - 1)) for node in range(drafts)] for _ in range(count)]
    return parents, [draw(st.integers(0, 20)) for _ in range(count)], draw(st.integers(0, 12))


@pytest.mark.parametrize("static", [False, True])
@given(drawn=trees())
@settings(max_examples=60, deadline=None)
def test_a_window_counts_positions(static: bool, drawn: tuple[list[list[int]], list[int], int]) -> None:
    parents, prefixes, window = drawn
    drafts = len(parents[0])
    table = RequestTable(4, 32, 4, [window], [PageAllocator(40)])
    rows = [table.add() for _ in prefixes]
    lengths = [prefix + drafts for prefix in prefixes]
    for row, length in zip(rows, lengths, strict=True):
        table.extend(row, length)
    batch = ForwardBatch(
        ForwardMode.TARGET_VERIFY, rows, lengths, [drafts] * len(rows), DraftTree.from_parents(parents), padding=1
    )
    (step,) = StepBuffers(4, 32, 8, static=static).build(batch, table)
    seen = step.windowed(window)
    assert seen.tree_mask is not None
    mask = windowed_tree_mask(seen, seen.tree_mask, window)
    assert mask.shape == (len(rows) + 1, 1, drafts, seen.max_seqlen_k)
    layer = AttentionLayer(0, 1, 1, 8, window=window)
    for n, (tree, length) in enumerate(zip(parents, lengths, strict=True)):
        kept = int(seen.seq_lens[n])
        expected = tree_mask(layer, tree, length)
        assert not expected[:, : length - kept].any(), "a page that a draft sees was left out"
        assert torch.equal(mask[n, 0, :, :kept], expected[:, length - kept :])
