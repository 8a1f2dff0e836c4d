"""This module limits how many threads each library may use: a backend as many as the process has, the kit's own
mathematics one.

The kit computes thousands of problems too small to share. Threads that wait for each other there take many times longer
than one alone, most of all on a machine that is busy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["backends_threads", "one_thread"]

_process: list[int] = []
"""The process's own number, while the kit works with one."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within: the kit's own work."""
    _process.append(torch.get_num_threads())
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_process.pop())


@contextlib.contextmanager
def backends_threads() -> Iterator[None]:
    """Within `one_thread`, around a call of the backend: the threads that its users would have."""
    before = torch.get_num_threads()
    torch.set_num_threads(_process[0] if _process else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
