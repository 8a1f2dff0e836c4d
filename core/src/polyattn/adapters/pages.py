"""Pools of pages as pools of smaller pages, by views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import UnsupportedRequestError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cut_pages"]


def cut_pages(pools: Mapping[str, Tensor], P: int, p: int) -> tuple[dict[str, Tensor], int]:
    """View pools of pages of P tokens as pools of pages of p tokens, in the same memory.

    Args:
        pools: name -> [pages, P, ...], of any dtype. P, p: tokens of a page; p divides P.

    Returns:
        (name -> [more pages, p, ...], step): page i of P tokens starts with the smaller page i * step.

    Raises:
        UnsupportedRequestError: they are not stored so that one step does for all of them.
    """
    step = _step(pools, P, p)
    return {name: _cut(pool, P, p, step) for name, pool in pools.items()}, step


def _step(pools: Mapping[str, Tensor], P: int, p: int) -> int:
    """Smaller pages from one page of the table to the next: more than P / p where other data lies between the pages,
    as in a pool that keeps keys and values side by side."""
    steps = {}
    for name, pool in pools.items():
        rows = pool.stride(1)
        between = pool.stride(0) if pool.shape[0] > 1 else P * rows
        steps[name] = between // (rows * p) if rows and between % (rows * p) == 0 and between >= P * rows else None
    found = set(steps.values())
    step = found.pop()
    if found or step is None:
        strides = ", ".join(f"{name} has strides {tuple(pool.stride())}" for name, pool in pools.items())
        raise UnsupportedRequestError(
            f"pages of {P} tokens cannot be read as pages of {p} here: {strides}. Their pages must follow each other "
            f"at one multiple of {p} rows for all: make the caches contiguous, or name a backend for pages of {P}"
        )
    return step


def _cut(pool: Tensor, P: int, p: int, step: int) -> Tensor:
    """`pool` [pages, P, ...] as [more pages, p, ...], in the same memory."""
    count = (pool.shape[0] - 1) * step + P // p if pool.shape[0] else 0
    return pool.as_strided((count, p, *pool.shape[2:]), (pool.stride(1) * p, *pool.stride()[1:]))
