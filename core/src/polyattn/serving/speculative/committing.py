"""This module moves the K/V of an accepted path to their place in the cache."""

from __future__ import annotations

from torch import Tensor

from ...errors import InvalidInputError
from .acceptance import Accepted

__all__ = ["commit"]


def commit(accepted: Accepted, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The moves that put an accepted path where plain decoding would have written it.

    The verifying call wrote node i of a row at slot `slots[n, i]`, the i-th place after the row's prefix. The j-th node
    of the path belongs at the j-th place. A path ascends, so no move overwrites what a later one reads; all the same,
    read every source before the first target is written, as `KVPool.move` does. Nothing is waited for: what stays
    where it is, rejected drafts included, is a move of a slot onto itself.

    Args:
        accepted: of the step. slots: int64 [N, N_d] or [N * N_d], where one cache group has the nodes (`Step.slots`).

    Returns:
        (sources, targets), int64 [N * N_d] each: `pool.move(group, sources, targets)`. Then shorten the row to its
        prefix and `accepted.lengths + 1` tokens; the slots past that are free for the next step.

    Raises:
        InvalidInputError: slots are not one for each node.
    """
    rows, wide = accepted.nodes.shape
    if slots.numel() != rows * wide:
        raise InvalidInputError(
            f"slots has shape {tuple(slots.shape)}; one for each node is needed, [{rows}, {wide}] or [{rows * wide}]: "
            f"the slots of the verifying step"
        )
    targets = slots.reshape(rows, wide)
    sources = targets.gather(1, accepted.nodes.clamp(min=0))
    return sources.where(accepted.nodes >= 0, targets).reshape(-1), targets.reshape(-1)
