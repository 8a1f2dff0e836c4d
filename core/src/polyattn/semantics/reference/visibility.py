"""This module defines which keys a query may see: by position (S3, S4), and in a tree of drafts (S8)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...contract import Causal
from ...errors import InvalidInputError


def visible(
    S_q: int,
    S_k: int,
    *,
    causal: Causal = "none",
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    device: torch.device | str | None = None,
    q_offset: int | Tensor | None = None,
) -> Tensor | None:
    """Return which keys each query may see by position alone (S3, S4). The rule lives here and nowhere else.

    Query row i stands at key position p = i + q_offset. Key j is seen when all of these hold:

    - causal: j <= p
    - window (left, right): p - left <= j <= p + right, a bound of -1 being no bound
    - chunk C: j <= p, and j and p lie in the same block of C positions

    Args:
        S_q, S_k: lengths.
        causal: none, bottom_right or top_left.
        window: (left, right), inclusive counts.
        chunk: block length of chunked-local attention, 0 = off.
        device: where the result lives.
        q_offset: position of row 0; None = S_k - S_q, or 0 for top_left. A tensor [..., 1, 1] has one for each of
            several sequences.

    Returns:
        bool [S_q, S_k] or [..., S_q, S_k], True = seen; None when no rule is in force.
    """
    left, right = window
    if causal == "none" and left < 0 and right < 0 and not chunk:
        return None
    p, j = positions(S_q, S_k, causal, q_offset, device)
    seen = torch.ones(S_q, S_k, dtype=torch.bool, device=device)
    if causal != "none":
        seen = seen & (j <= p)
    if left >= 0:
        seen = seen & (j >= p - left)
    if right >= 0:
        seen = seen & (j <= p + right)
    if chunk:
        seen = seen & (j <= p) & (j // chunk == p // chunk)
    return seen


def same_segment(q_segments: Tensor, k_segments: Tensor) -> Tensor:
    """Return which keys are in the segment of a query (S8): bool [B, S_q, S_k] of [B, S_q] and [B, S_k]."""
    return q_segments[:, :, None] == k_segments[:, None, :]


def alibi_bias(slopes: Tensor, p: Tensor, j: Tensor) -> Tensor:
    """Return what ALiBi adds to the logits (S8): -slope * |p - j|, [..., H_q, S_q, S_k].

    Args:
        slopes: [H_q]. p, j: positions of queries and keys on the keys' axis, [..., S_q, 1] and [1, S_k].
    """
    return -slopes[:, None, None] * (p - j).abs()[..., None, :, :]


def positions(
    S_q: int, S_k: int, causal: Causal, q_offset: int | Tensor | None, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """Positions of the queries [..., S_q, 1] and of the keys [1, S_k], on the keys' axis."""
    offset = first_position(S_q, S_k, causal) if q_offset is None else q_offset
    return torch.arange(S_q, device=device)[:, None] + offset, torch.arange(S_k, device=device)[None, :]


def first_position(S_q: int, S_k: int, causal: Causal) -> int:
    return 0 if causal == "top_left" else S_k - S_q


def tree_mask(parents: Sequence[int] | Tensor) -> Tensor:
    """The mask of a draft tree (S8): every node sees itself and its ancestors.

    Args:
        parents: [N_d], the parent of each node, -1 for a root; a parent comes before its children.

    Returns:
        bool [N_d, N_d], True = attend, on the CPU (or the device of `parents`).

    Raises:
        InvalidInputError: a parent that does not come before its child.
    """
    listed = [int(p) for p in parents]
    mask = torch.eye(len(listed), dtype=torch.bool)
    for node, parent in enumerate(listed):
        if parent >= node:
            raise InvalidInputError(
                f"parents[{node}] = {parent}: the parent of a draft node must come before it (-1 to {node - 1}); "
                "number the nodes so that parents come first"
            )
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask.to(parents.device) if isinstance(parents, Tensor) else mask


def verify_mask(prefix_len: int, parents: Sequence[int] | Tensor) -> Tensor:
    """The mask of tree verification: the whole prefix, then `tree_mask`.

    Returns:
        bool [N_d, prefix_len + N_d].
    """
    tree = tree_mask(parents)
    return torch.cat([tree.new_ones(tree.shape[0], prefix_len), tree], dim=1)
