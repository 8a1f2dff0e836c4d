"""Draft trees under a sliding window: which keys a node sees when distances are those of positions, not of places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .tree import write_attn_mask

if TYPE_CHECKING:
    from torch import Tensor

    from .step import Step

__all__ = ["windowed_tree_mask"]


def windowed_tree_mask(step: Step, tree: Tensor, window: int) -> Tensor:
    """The mask of a tree's layers with a window, in memory that the step keeps.

    A kernel's window counts places in the cache, and siblings are at different places and at one position: node i is at
    position prefix + depth_i. It sees key j of the prefix where prefix + depth_i - j <= window, and of its ancestors
    and itself those where depth_i - depth_j <= window.

    Args:
        step: whose drafts they are. tree: its `tree_mask`, bool [N, N_d, N_d]. window: earlier keys that a query sees.

    Returns:
        bool [N, 1, N_d, max_seqlen_k], True = attend. Nothing waits for the device.
    """
    N, N_d = step.sequences, tree.shape[1]
    depth = tree.sum(-1, dtype=torch.int32) - 1
    prefix = (step.seq_lens - N_d).clamp(min=0)
    near = tree & (depth[:, :, None] - depth[:, None, :] <= window)
    columns = prefix[:, None] + step.counting(N_d)
    out = step.take("windowed_tree_mask", torch.bool, N, 1, N_d, step.max_seqlen_k)
    write_attn_mask(out, near, columns.long())
    key = step.counting(step.max_seqlen_k)
    far = (prefix[:, None] + depth)[:, :, None] - key > window
    return out.logical_and_(((key >= prefix[:, None])[:, None, :] | ~far).unsqueeze(1))
