"""This module fills unwritten memory with NaN while a backend runs, so that an unwritten output cannot look right by
luck.

Two ways, each with its limit. Torch's own Python calls for uninitialised memory are replaced: that reaches every
adapter and Triton kernel, not what C++ allocates inside an op. And the allocator is soiled: blocks of the usual sizes
are filled with NaN and freed, and the next allocations of a C++ op on the same stream get them (sure on CUDA with its
caching allocator, a matter of chance on the CPU). `torch.use_deterministic_algorithms` would fill memory too, but it
is a request for a deterministic backend and would change what is chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .threads import backends_threads

__all__ = ["poisoned"]

_ALLOCATING = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided")),
    *((Tensor, name) for name in ("new_empty", "new_empty_strided")),
)
_BYTES = (2**9, 2**12, 2**14, 2**16, 2**18, 2**20, 2**21)


@contextlib.contextmanager
def poisoned(device: torch.device) -> Iterator[None]:
    """Around a call of a backend: uninitialised memory of floating dtypes is NaN."""
    _soil(device)
    with contextlib.ExitStack() as stack:
        for owner, name in _ALLOCATING:
            stack.enter_context(mock.patch.object(owner, name, _filling(getattr(owner, name))))
        stack.enter_context(backends_threads())
        yield


def _filling(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate(*args: Any, **kwargs: Any) -> Tensor:
        made = original(*args, **kwargs)
        if made.is_floating_point() and made.device.type != "meta":
            with torch.no_grad():
                made.fill_(float("nan"))
        return made

    return allocate


def _soil(device: torch.device) -> None:
    blocks = [torch.full((size // 4,), float("nan"), device=device) for size in _BYTES for _ in range(2)]
    del blocks
