"""This module checks that the keys of a token depend on the token and its position alone, as pages and prefix caches
need.

Every pass has equal tokens and attention that returns zeros, so only positions can make two rows differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LONG", "check_positions"]

LONG = 257
"""Tokens of the pass that looks for compressed keys: more than any model compresses into one (128 at most so far)."""

Rows = Callable[[Sequence[int]], list[tuple[Any, Tensor, Tensor, Tensor]]]
"""Positions -> (module, query, key, value) of every attention call, the tensors [1, H, S, D]."""


def check_positions(run: Rows, max_positions: int) -> tuple[str, ...] | None:
    """Say what pages cannot serve, why, and within which limits they could (where there are any), or None.

    Args:
        run: a pass of the model. max_positions: no position reaches it; 0 = not said, then none is tried that is large.
    """
    for module, *rows in run((0, 0, 0)):
        if any(_far(row[:, :, :1].expand_as(row), row) for row in rows):
            kind = type(module).__name__
            return (
                f"equal tokens at equal positions reached {kind} as different queries, keys or values",
                "the model ignores position_ids, or mixes neighbouring tokens, and a packed step has many requests",
            )
    if max_positions > 2 and (module := _changed(run, max_positions - 1)):
        border = _border(run, max_positions - 1)
        _changed(run, 2)  # frequencies that grew are small again
        kind = type(module).__name__
        return (
            f"the keys of {kind} change for all tokens of a step once one of them is at position {border} or later",
            "a request would be answered differently beside a longer one, and cached keys go stale",
            f" at every length (CausalLMRunner(model, max_positions={border}) serves requests that end before)",
        )
    for module, query, key, _ in run(range(min(LONG, max_positions or LONG))):
        if key.shape[2] != query.shape[2]:
            return (
                f"{query.shape[2]} tokens reached {type(module).__name__} with {key.shape[2]} keys",
                "a page has one key for each token, and compressed keys have no place",
            )
    return None


def _changed(run: Rows, last: int) -> Any:
    """Find a module whose rows of the first two tokens depend on the position of the third, or None. The short pass
    comes last: some models keep what the longest pass made of their frequencies until a short one."""
    far, near = run((0, 1, last)), run((0, 1, 2))
    for (module, *long), (_, *short) in zip(far, near, strict=True):
        if any(_far(a[:, :, :2], b[:, :, :2]) for a, b in zip(long, short, strict=True)):
            return module
    return None


def _border(run: Rows, changed: int) -> int:
    """Find the first position that changes the rows of the others, by halving."""
    same = 2
    while changed - same > 1:
        middle = (same + changed) // 2
        same, changed = (same, middle) if _changed(run, middle) else (middle, changed)
    return changed


def _far(own: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors differ by more than rounding."""
    if not (own.isfinite().all() and other.isfinite().all()):
        return False  # weights that are no numbers tell nothing of positions; the engine refuses their logits
    limit = 1e-4 if own.dtype.itemsize >= 4 else 1e-2
    distance = (own.double() - other.double()).norm()
    return not bool(distance <= limit * torch.maximum(own.double().norm(), other.double().norm()))
