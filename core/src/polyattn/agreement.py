"""Ranks of one job that ask for the same must be served by the same: what their files say may differ.

Ranks compare through the key-value store of torch.distributed, which no rank waits on another for: the first to resolve
a request says what it chose, those that come later compare. So ranks that ask for different things, as the stages of a
pipeline do, are in nobody's way.
"""

from __future__ import annotations

import collections
import hashlib

import torch

from .errors import ConfigError
from .records import AttentionRequest

__all__ = ["agree", "distributed"]

_asked: collections.Counter[str] = collections.Counter()


def distributed() -> bool:
    """Whether this process is one of several ranks."""
    here = torch.distributed.is_available() and torch.distributed.is_initialized()
    return bool(here and torch.distributed.get_world_size() > 1)


def agree(request: AttentionRequest, choice: str, why: str) -> None:
    """Compare a choice with that of the other ranks, in a job that is `distributed`.

    Args:
        choice: the same text on ranks that chose the same. why: for people.

    Raises:
        ConfigError: a rank chose otherwise for the same request.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    name = "polyattn/choice/" + hashlib.sha256(repr(request).encode()).hexdigest()[:24]
    _asked[name] += 1
    # A request is resolved anew when something changed: the n-th time is compared with the n-th time elsewhere.
    key = f"{name}/{_asked[name]}"
    rank = torch.distributed.get_rank()
    if store.add(f"{key}/count", 1) == 1:
        store.set(key, f"{rank}\n{choice}\n{why}")
        return
    other, chosen, reason = store.get(key).decode().split("\n", 2)
    if chosen != choice:
        raise ConfigError(
            f"rank {rank} would serve {request.summary()} by {why}, and rank {other} by {reason}: ranks of one job "
            f"choose alike. Give them one tuning store (POLYATTN_TUNING_STORE) or copies of one, set "
            f"POLYATTN_TUNING=off, or name a backend"
        )
